"""Which links of a cluster each step of a schedule uses, and how many of its flows share one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._collective import ScheduleError
from ._ir import Schedule, Step
from ._network import Network


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The links under one step.

    Attributes:
        step: its number, repetitions counted.
        repeat: how many steps are like it.
        flows: how many flows it has.
        hops: the most links that one of them crosses.
        most_flows: the most flows that share one directed link.
        busiest: that link's name.
        seconds: the time of the step alone: the longest of all paths' latencies, and the bytes on the slowest link.
    """

    step: int
    repeat: int
    flows: int
    hops: int
    most_flows: int
    busiest: str
    seconds: float


def link_loads(schedule: Schedule, network: Network, nbytes: float = 1.0) -> tuple[StepLoad, ...]:
    """Lays every step of a schedule over a network.

    The transfers of one step from one endpoint to another are one flow. A step takes as long as the latency of its
    longest path and the bytes of its busiest link; the sum over steps is the time of an execution in lock step,
    which is an upper estimate, for without a barrier steps overlap.

    Args:
        schedule: any whose ranks and switches the network has.
        network: see `Network`.
        nbytes: S, the size of the vector (see `Collective.vector_blocks`).

    Raises:
        ScheduleError: the network has fewer ranks than the schedule, or lacks one of its switches.
    """
    nodes = place(schedule, network)
    vector = schedule.chunks // schedule.collective.blocks * schedule.collective.vector_blocks
    loads = []
    number = 0
    for step in schedule.steps:
        loads.append(_load(number, step, nodes, network, nbytes / vector))
        number += step.repeat
    return tuple(loads)


def place(schedule: Schedule, network: Network) -> NDArray[np.int64]:
    """The node of each endpoint of a schedule.

    Raises:
        ScheduleError: see `link_loads`.
    """
    if len(network.ranks) < schedule.world:
        raise ScheduleError(
            f"the cluster has places for {len(network.ranks)} ranks and the schedule {schedule.world}; "
            "take a larger cluster or a smaller world"
        )
    switches = []
    for name in schedule.switches:
        try:
            switches.append(network.node(name))
        except KeyError:
            raise ScheduleError(f"the cluster has no switch {name!r}, which {schedule.name} reduces in") from None
    return np.concatenate([network.ranks[: schedule.world], np.array(switches, np.int64)]).astype(np.int64)


def _load(number: int, step: Step, nodes: NDArray[np.int64], network: Network, chunk_bytes: float) -> StepLoad:
    if not len(step):
        return StepLoad(number, step.repeat, 0, 0, 0, "", 0.0)
    ends = nodes[step.source] * (nodes.max() + 1) + nodes[step.destination]
    _, first, flow = np.unique(ends, return_index=True, return_inverse=True)
    size = np.bincount(flow, weights=(step.stop - step.start) * chunk_bytes)
    routes = network.routes(nodes[step.source[first]], nodes[step.destination[first]])
    hops = np.diff(routes.offsets)
    flow_of = np.repeat(np.arange(len(hops)), hops)
    links = len(network.capacity_Bps)
    count = np.bincount(routes.links, minlength=links)
    load = np.bincount(routes.links, weights=size[flow_of], minlength=links)
    latency = np.bincount(flow_of, weights=network.latency_s[routes.links], minlength=len(hops))
    transfer_s = load / network.capacity_Bps
    busiest = int(transfer_s.argmax())
    return StepLoad(
        step=number,
        repeat=step.repeat,
        flows=len(hops),
        hops=int(hops.max()),
        most_flows=int(count.max()),
        busiest=network.link_names[busiest],
        seconds=float(latency.max() + transfer_s[busiest]),
    )
