"""A cluster emulated on one Linux machine: network namespaces, cables with the described rates, routed switches.

Read `_wiring.py` (what of a cluster becomes what), `_build.py` (how the kernel is asked), `_keeper.py` (who holds it)
and `_sweep.py` (why nothing remains).
"""

from typing import TYPE_CHECKING

from hocket._lazy import lazy

if TYPE_CHECKING:
    from ._check import Check, check
    from ._errors import FabricError, FabricInputError
    from ._fabric import Fabric, clear_stale
    from ._state import FabricState, fabrics
    from ._wiring import Node, Port, Wiring, wire

__all__ = [
    "Check", "Fabric", "FabricError", "FabricInputError", "FabricState", "Node", "Port", "Wiring", "check",
    "clear_stale", "fabrics", "wire",
]  # fmt: skip

__getattr__ = lazy(  # what runs in every rank must be light
    __name__,
    {
        "_check": "Check check",
        "_errors": "FabricError FabricInputError",
        "_fabric": "Fabric clear_stale",
        "_state": "FabricState fabrics",
        "_wiring": "Node Port Wiring wire",
    },
)
