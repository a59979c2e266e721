"""What simulated work takes on links that reach what is usual, or what was fitted, and how sure that is.

A simulation moves bytes at the rates that a cluster describes. Real collectives reach a part of them, and each costs
something to start: `Constants` say how much, and `spread` how sure they are.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hocket.cluster import Cluster
from hocket.schedule import Schedule
from hocket.simulate import StepGraph, simulate_sizes, simulate_step

from ..network import Constants
from ._interval import spread

_GATHERS = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class ExpectedTime:
    """What is expected of real links.

    Attributes:
        seconds: How long it takes.
        interval_s: Seconds that hold 80% of what is measured.
    """

    seconds: float
    interval_s: tuple[float, float]

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {"seconds": self.seconds, "interval_s": list(self.interval_s)}


def reached_links(cluster: Cluster, constants: Constants, *, hosts: int = 0) -> Cluster:
    """Return a cluster whose links carry what collectives reach of them.

    Args:
        cluster: As it is described.
        constants: `inside_share` of links inside hosts, `network_share` and `congestion` of those between them.
        hosts: How many take part; all if 0.
    """
    ends = cluster.hosts[cluster.link_tail], cluster.hosts[cluster.link_head]
    inside = (ends[0] == ends[1]) & (ends[0] >= 0)
    many = hosts or len(np.unique(cluster.hosts[cluster.ranks]))
    between = constants.network_share / (1 + constants.congestion * math.log2(max(1, many)))
    capacity_Bps = cluster.capacity_Bps * np.where(inside, constants.inside_share, between)
    return dataclasses.replace(cluster, capacity_Bps=capacity_Bps, recipe=None)


def expected_collective(
    schedule: Schedule, cluster: Cluster, sizes: list[float], *, constants: Constants | None = None, seed: int = 0
) -> list[ExpectedTime]:
    """Return what a collective takes, by size.

    Args:
        schedule: Of the collective; rank r runs on rank r of the cluster.
        cluster: Where.
        sizes: Bytes of the vector.
        constants: What is reached; what the cluster says, and else what is usual (`Constants.of`), if not given.
        seed: Of ECMP's hash.

    Raises:
        SimulationError: the schedule does not fit the cluster.
    """
    known = Constants.of(cluster.reached) if constants is None else constants
    links = reached_links(cluster, known, hosts=len(np.unique(cluster.hosts[cluster.ranks[: schedule.world]])))
    share = known.gather_share if schedule.collective.kind in _GATHERS else 1.0
    late_s, *spent = (one.seconds for one in simulate_sizes(schedule, links, [0.0, *sizes], seed=seed))
    found = []
    for seconds in spent:
        moving_s = max(0.0, seconds - late_s) / share
        parts = {"gradients": moving_s, "overhead": late_s + known.collective_s}
        found.append(_expected(parts, known, schedule.world, measured=False))
    return found


def expected_step(
    graph: StepGraph,
    cluster: Cluster,
    *,
    constants: Constants | None = None,
    slowdown: ArrayLike | None = None,
    seed: int = 0,
) -> ExpectedTime:
    """Return what a simulated step takes whose computation takes the time that its graph says.

    Args:
        graph: What is run; rank r runs on rank r of the cluster.
        cluster: Where.
        constants: What is reached; what the cluster says, and else what is usual (`Constants.of`), if not given.
        slowdown: Of every rank, or of all alike, what its computation is multiplied by.
        seed: Of ECMP's hash.

    Raises:
        SimulationError: the step does not fit the cluster.
    """
    known = Constants.of(cluster.reached) if constants is None else constants
    links = reached_links(cluster, known, hosts=len(np.unique(cluster.hosts[cluster.ranks[: graph.world]])))
    timing = simulate_step(graph, links, seed=seed, slowdown=slowdown)
    last = int(timing.compute_s.argmax())  # the rank that computes most waits least for others
    compute_s, exposed_s = float(timing.compute_s[last]), float(timing.exposed_s[last])
    parts = {"compute": compute_s, "gradients": exposed_s, "bubble": max(0.0, timing.seconds - compute_s - exposed_s)}
    return _expected(parts, known, graph.world, measured=True)


def expected_order(seconds: float, idle_share: float) -> ExpectedTime:
    """Return how sure the time of a pipeline's order is whose works and messages take given times.

    Args:
        seconds: Of the step.
        idle_share: The part of it in which ranks do not compute, in the mean.
    """
    parts = {"compute": (1 - idle_share) * seconds, "bubble": idle_share * seconds}
    return _expected(parts, Constants.of({}), 1, measured=True)


def _expected(parts: dict[str, float], known: Constants, workers: int, *, measured: bool) -> ExpectedTime:
    times = spread(parts, known, workers=workers, hidden_s=0.0, measured=measured)
    seconds = sum(parts.values())
    return ExpectedTime(seconds, (seconds / times, seconds * times))
