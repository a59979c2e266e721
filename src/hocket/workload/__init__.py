"""Workloads: what one training step of a model asks for; captured from a module, or analytic.

What needs torch (`capture`, `divided_share`, `summed`, `trial`, `watching`) loads it when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from ._finer import WorkloadStep, refined
from ._share import FORMATS, PARTS, DividedShare, Exchange, Operation, Share, WorkloadError
from ._text import parse
from ._transformer import LLAMAS, MIXTRALS, SHAPES, llama, named_transformer, transformer
from ._workload import Layer, Workload

if TYPE_CHECKING:
    from ._capture import capture
    from ._shares import divided_share
    from ._trace import watching
    from ._trial import summed, trial

__all__ = [
    "FORMATS", "LLAMAS", "MIXTRALS", "PARTS", "SHAPES", "DividedShare", "Exchange", "Layer", "Operation", "Share",
    "Workload", "WorkloadError", "WorkloadStep", "capture", "divided_share", "llama", "named_transformer", "parse",
    "refined", "summed", "transformer", "trial", "watching",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load what needs torch, and torch with it, when it is first asked for."""
    if name not in ("capture", "divided_share", "summed", "trial", "watching"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._capture import capture
    from ._shares import divided_share
    from ._trace import watching
    from ._trial import summed, trial

    globals().update(capture=capture, divided_share=divided_share, summed=summed, trial=trial, watching=watching)
    return globals()[name]
