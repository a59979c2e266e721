"""Workloads: what one training step of a model asks for; captured from a module, or analytic.

`capture` alone needs torch, which is loaded when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from ._share import PARTS as PARTS
from ._share import Exchange as Exchange
from ._share import Operation as Operation
from ._share import Share as Share
from ._share import WorkloadError as WorkloadError
from ._text import parse as parse
from ._text import to_text as to_text
from ._transformer import SHAPES as SHAPES
from ._transformer import named_transformer as named_transformer
from ._transformer import transformer as transformer
from ._workload import Layer as Layer
from ._workload import Workload as Workload

if TYPE_CHECKING:
    from ._capture import capture as capture

__all__ = [
    "PARTS",
    "SHAPES",
    "Exchange",
    "Layer",
    "Operation",
    "Share",
    "Workload",
    "WorkloadError",
    "capture",
    "named_transformer",
    "parse",
    "to_text",
    "transformer",
]


def __getattr__(name: str) -> Any:
    """Load `capture`, and torch with it, when it is first asked for."""
    if name == "capture":
        from ._capture import capture

        globals()[name] = capture
        return capture
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
