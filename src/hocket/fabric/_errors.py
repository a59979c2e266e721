"""What can go wrong with an emulated cluster."""


class FabricError(RuntimeError):
    """A fabric cannot be made, found or asked; the message says why and what to do."""


class FabricInputError(FabricError):
    """What was asked for is no fabric, or can be none: its name, the cluster, a host; nothing was started."""
