"""Workloads: what one training step of a model asks for; captured from a module, or analytic.

`capture`, `summed` and `trial` alone need torch, which is loaded when they are first asked for.
"""

from typing import TYPE_CHECKING, Any

from ._finer import WorkloadStep, refined
from ._share import PARTS, Exchange, Operation, Share, WorkloadError
from ._text import parse
from ._transformer import SHAPES, named_transformer, transformer
from ._workload import Layer, Workload

if TYPE_CHECKING:
    from ._capture import capture
    from ._trial import summed, trial

__all__ = [
    "PARTS", "SHAPES", "Exchange", "Layer", "Operation", "Share", "Workload", "WorkloadError", "WorkloadStep",
    "capture", "named_transformer", "parse", "refined", "summed", "transformer", "trial",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load what needs torch, and torch with it, when it is first asked for."""
    if name not in ("capture", "summed", "trial"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._capture import capture
    from ._trial import summed, trial

    globals().update(capture=capture, summed=summed, trial=trial)
    return globals()[name]
