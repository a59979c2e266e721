"""What can go wrong with an emulated cluster."""


class FabricError(RuntimeError):
    """A fabric cannot be made, found or asked; the message says why and what to do."""
