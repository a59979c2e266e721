"""A cluster emulated on one Linux machine: network namespaces, cables with the described rates, routed switches.

Read `_wiring.py` (what of a cluster becomes what), `_build.py` (how the kernel is asked), `_keeper.py` (who holds it)
and `_sweep.py` (why nothing remains).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._check import Check, check
    from ._errors import FabricError, FabricInputError
    from ._fabric import Fabric, clear_stale
    from ._state import FabricState
    from ._state import read_all as fabrics
    from ._wiring import Node, Port, Wiring, wire

__all__ = [
    "Check", "Fabric", "FabricError", "FabricInputError", "FabricState", "Node", "Port", "Wiring", "check",
    "clear_stale", "fabrics", "wire",
]  # fmt: skip

_HOMES = {
    "Check": ("_check", "Check"),
    "Fabric": ("_fabric", "Fabric"),
    "FabricError": ("_errors", "FabricError"),
    "FabricInputError": ("_errors", "FabricInputError"),
    "Node": ("_wiring", "Node"),
    "Port": ("_wiring", "Port"),
    "FabricState": ("_state", "FabricState"),
    "Wiring": ("_wiring", "Wiring"),
    "check": ("_check", "check"),
    "clear_stale": ("_fabric", "clear_stale"),
    "fabrics": ("_state", "read_all"),
    "wire": ("_wiring", "wire"),
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for: what runs in every rank must be light."""
    if name in _HOMES:
        module, attribute = _HOMES[name]
        value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
