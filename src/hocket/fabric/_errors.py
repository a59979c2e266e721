"""What can go wrong with an emulated cluster."""


class FabricError(RuntimeError):
    """A fabric cannot be made, found or asked; the message says why and what to do."""


class FabricInputError(FabricError):
    """What was asked for can be no fabric: its name, or the cluster; nothing was started."""
