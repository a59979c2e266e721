"""What was measured for the planner."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.planner import Constants, MeasuredPlan, Network
from hocket.workload import Workload


@dataclass(frozen=True)
class Calibration:
    """What was measured, the same on every rank.

    Attributes:
        workload: the model, with the times that a rank takes when it computes alone.
        network: the ranks' network as a ring of equals, and how many of them compute at full speed at once.
        constants: what collectives of shards reach, and the overhead of steps, stages and blocks.
        runs: plans of the model that were run, on which the network's `at_once` and the overheads were fitted.
    """

    workload: Workload
    network: Network
    constants: Constants
    runs: tuple[MeasuredPlan, ...] = ()
