"""Workloads: what one training step of a model asks for; captured from a module, or analytic.

What needs torch (`autocast_of_a_gpu`, `capture`, `divided_share`, `summed`, `trial`, `watching`) loads it when it is
first asked for.
"""

from typing import TYPE_CHECKING

from hocket._lazy import lazy

from ._finer import WorkloadStep, refined
from ._share import FORMATS, PARTS, DividedShare, Exchange, Operation, Share, WorkloadError
from ._text import parse
from ._transformer import LLAMAS, MIXTRALS, SHAPES, llama, named_transformer, transformer
from ._workload import Layer, Workload

if TYPE_CHECKING:
    from ._autocast import autocast_of_a_gpu
    from ._capture import capture
    from ._optimizers import OptimizerMaker, Update, optimizer_maker
    from ._shares import divided_share
    from ._trace import watching
    from ._trial import summed, trial

__all__ = [
    "FORMATS", "LLAMAS", "MIXTRALS", "PARTS", "SHAPES", "DividedShare", "Exchange", "Layer", "Operation",
    "OptimizerMaker", "Share", "Update",
    "Workload", "WorkloadError", "WorkloadStep", "autocast_of_a_gpu", "capture", "divided_share", "llama",
    "named_transformer",
    "optimizer_maker", "parse",
    "refined", "summed", "transformer", "trial", "watching",
]  # fmt: skip

__getattr__ = lazy(
    __name__,
    {
        "_autocast": "autocast_of_a_gpu",
        "_capture": "capture",
        "_optimizers": "OptimizerMaker Update optimizer_maker",
        "_shares": "divided_share",
        "_trace": "watching",
        "_trial": "summed trial",
    },
)
