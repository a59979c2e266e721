"""Workloads: what one training step of a model asks for; captured from a module, or analytic.

`capture`, `summed` and `trial` alone need torch, which is loaded when they are first asked for.
"""

from typing import TYPE_CHECKING, Any

from ._finer import WorkloadStep as WorkloadStep
from ._finer import refined as refined
from ._share import PARTS as PARTS
from ._share import Exchange as Exchange
from ._share import Operation as Operation
from ._share import Share as Share
from ._share import WorkloadError as WorkloadError
from ._text import parse as parse
from ._transformer import SHAPES as SHAPES
from ._transformer import named_transformer as named_transformer
from ._transformer import transformer as transformer
from ._workload import Layer as Layer
from ._workload import Workload as Workload

if TYPE_CHECKING:
    from ._capture import capture as capture
    from ._trial import summed as summed
    from ._trial import trial as trial

__all__ = [
    "PARTS",
    "SHAPES",
    "Exchange",
    "Layer",
    "Operation",
    "Share",
    "WorkloadStep",
    "Workload",
    "WorkloadError",
    "capture",
    "named_transformer",
    "parse",
    "refined",
    "summed",
    "transformer",
    "trial",
]


def __getattr__(name: str) -> Any:
    """Load what needs torch, and torch with it, when it is first asked for."""
    if name not in ("capture", "summed", "trial"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._capture import capture
    from ._trial import summed, trial

    globals().update(capture=capture, summed=summed, trial=trial)
    return globals()[name]
