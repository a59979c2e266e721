"""Pipeline parallelism: an ordinary model, cut into stages that different ranks run at the same time."""

from hocket.planner import balance
from hocket.schedule.pipeline import bubble

from ._forward_recorder import followed
from ._measure import Times, measure, measured
from ._micro import Micro, cut, sizes
from ._partition import order_digest
from ._pipeline import Pipeline, StageError, changing_buffers
from ._recompute import checkpointed
from ._run import Run, StageSpan, idle_shares
from ._split import split, unbalanced
from ._stage import Stage
from ._steps import in_steps, steps_of
from ._trace import SplitError, trace, traced_in_both_modes
from ._wire import StageWire

__all__ = [
    "Micro", "Pipeline", "Run", "SplitError", "Stage", "StageError", "StageSpan", "StageWire", "Times", "balance",
    "bubble", "changing_buffers", "checkpointed", "cut", "followed", "idle_shares", "in_steps", "measure",
    "measured", "order_digest", "sizes", "split", "steps_of", "trace", "traced_in_both_modes", "unbalanced",
]  # fmt: skip
