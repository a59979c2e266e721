"""Pipeline parallelism: an ordinary model, cut into stages that different ranks run at the same time."""

from hocket.planner import balance as balance
from hocket.schedule.pipeline import bubble as bubble

from ._measure import Times as Times
from ._measure import measure as measure
from ._micro import Micro as Micro
from ._micro import cut as cut
from ._pipeline import Pipeline as Pipeline
from ._run import Run as Run
from ._run import StageSpan as StageSpan
from ._run import idle_shares as idle_shares
from ._split import split as split
from ._stage import Stage as Stage
from ._steps import in_steps as in_steps
from ._steps import steps_of as steps_of
from ._trace import SplitError as SplitError
from ._trace import trace as trace
from ._wire import StageWire as StageWire

__all__ = [
    "Micro",
    "Pipeline",
    "Run",
    "StageSpan",
    "SplitError",
    "Stage",
    "Times",
    "StageWire",
    "balance",
    "bubble",
    "cut",
    "idle_shares",
    "in_steps",
    "measure",
    "split",
    "steps_of",
    "trace",
]
