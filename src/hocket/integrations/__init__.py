"""Other libraries' training loops: callbacks that add their steps, losses and phases to the run's record.

Each is loaded, with its library, when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._keras import KerasRecorder
    from ._lightning import LightningRecorder
    from ._transformers import TransformersRecorder

__all__ = ["KerasRecorder", "LightningRecorder", "TransformersRecorder"]

_HOMES = {"KerasRecorder": "_keras", "LightningRecorder": "_lightning", "TransformersRecorder": "_transformers"}


def __getattr__(name: str) -> Any:
    """Load a callback when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
