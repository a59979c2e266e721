"""Predictions: collectives and training steps on a described cluster, by max-min fair flows. No torch, no wall clock.

Read `_fair.py` (what flows get), `_tasks.py` (what all comes down to), `_loop.py` (how time goes on), `_lower.py` (a
schedule as tasks), `_reduce.py` (switches), `_pipeline.py` (an order by itself, and as a step).
"""

from ._fair import Usage as Usage
from ._fair import max_min as max_min
from ._flows import simulate_flows as simulate_flows
from ._graph import StepGraph as StepGraph
from ._graph import Work as Work
from ._pipeline import OrderTiming as OrderTiming
from ._pipeline import StageWork as StageWork
from ._pipeline import order_graph as order_graph
from ._pipeline import simulate_order as simulate_order
from ._schedule import LinkUse as LinkUse
from ._schedule import ScheduleTiming as ScheduleTiming
from ._schedule import simulate_schedule as simulate_schedule
from ._settings import Protocol as Protocol
from ._settings import Settings as Settings
from ._step import StepTiming as StepTiming
from ._step import simulate_step as simulate_step
from ._stream import Stream as Stream
from ._tasks import LoadTrace as LoadTrace
from ._tasks import Outcome as Outcome
from ._tasks import SimulationError as SimulationError

__all__ = [
    "LinkUse",
    "LoadTrace",
    "OrderTiming",
    "Outcome",
    "Protocol",
    "ScheduleTiming",
    "Settings",
    "SimulationError",
    "StageWork",
    "StepGraph",
    "StepTiming",
    "Stream",
    "Usage",
    "Work",
    "max_min",
    "order_graph",
    "simulate_flows",
    "simulate_order",
    "simulate_schedule",
    "simulate_step",
]
