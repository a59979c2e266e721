"""Predictions: collectives and training steps on a described cluster, by max-min fair flows. No torch, no wall clock.

Read `_fair.py` (what flows get), `_tasks.py` (what all comes down to), `_loop.py` (how time goes on), `_lower.py` (a
schedule as tasks), `_reduce.py` (switches), `_pipeline.py` (an order by itself, and as a step).
"""

from ._fair import Usage, max_min
from ._flows import simulate_flows
from ._graph import StepGraph, Work
from ._pipeline import OrderTiming, StageWork, order_graph, simulate_order
from ._schedule import LinkUse, ScheduleTiming, simulate_schedule, simulate_sizes
from ._settings import Protocol, Settings
from ._step import LoweredCollectives, StepTiming, simulate_step
from ._stream import Stream
from ._tasks import LoadTrace, Outcome, SimulationError

__all__ = [
    "LinkUse", "LoadTrace", "LoweredCollectives", "OrderTiming", "Outcome", "Protocol", "ScheduleTiming", "Settings",
    "SimulationError", "StageWork", "StepGraph", "StepTiming", "Stream", "Usage", "Work", "max_min", "order_graph",
    "simulate_flows", "simulate_order", "simulate_schedule", "simulate_sizes",
    "simulate_step",
]  # fmt: skip
