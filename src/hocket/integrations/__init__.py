"""Other libraries: callbacks that add a loop's steps, losses and phases to the record, and Ray Train's backend.

Each is loaded, with its library, when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._keras import KerasRecorder
    from ._lightning import LightningRecorder
    from ._ray import RayConfig
    from ._transformers import TransformersRecorder

__all__ = ["KerasRecorder", "LightningRecorder", "RayConfig", "TransformersRecorder"]

_HOMES = {
    "KerasRecorder": "_keras",
    "LightningRecorder": "_lightning",
    "RayConfig": "_ray",
    "TransformersRecorder": "_transformers",
}


def __getattr__(name: str) -> Any:
    """Load a name's module when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
