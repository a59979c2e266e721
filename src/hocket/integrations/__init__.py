"""Other libraries: callbacks that add a loop's steps, losses and phases to the record, and Ray Train's backend.

Each is loaded, with its library, when it is first asked for.
"""

from typing import TYPE_CHECKING

from hocket._lazy import lazy

if TYPE_CHECKING:
    from ._keras import KerasRecorder
    from ._lightning import LightningRecorder
    from ._ray import RayConfig
    from ._transformers import TransformersRecorder

__all__ = ["KerasRecorder", "LightningRecorder", "RayConfig", "TransformersRecorder"]

__getattr__ = lazy(
    __name__,
    {
        "_keras": "KerasRecorder",
        "_lightning": "LightningRecorder",
        "_ray": "RayConfig",
        "_transformers": "TransformersRecorder",
    },
)
