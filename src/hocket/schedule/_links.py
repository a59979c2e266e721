"""Which links of a cluster each step of a schedule uses, and how many of its flows share one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ._collective import ScheduleError
from ._ir import Schedule, Step


class FlowRoutes(Protocol):
    """The directed links that each of several flows crosses, in order: `links[offsets[i]:offsets[i + 1]]`."""

    @property
    def offsets(self) -> NDArray[np.int64]:
        """One more than there are flows."""

    @property
    def links(self) -> NDArray[np.int64]:
        """Numbers of links."""


class RoutedNetwork(Protocol):
    """Nodes joined by directed links, and the paths that flows take; `hocket.cluster.Cluster` fits it."""

    @property
    def ranks(self) -> NDArray[np.int64]:
        """The node of each rank."""

    @property
    def capacity_Bps(self) -> NDArray[np.float64]:
        """Bytes per second of each link."""

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """Seconds of each link."""

    @property
    def link_names(self) -> Sequence[str]:
        """Name of each link, for people."""

    def node(self, name: str) -> int:
        """Return the node of that name, or raise KeyError."""

    def routes(self, source: NDArray[np.int64], destination: NDArray[np.int64]) -> FlowRoutes:
        """Return the links of one flow for each pair of nodes."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The links under one step.

    Attributes:
        step: Its number, repetitions counted.
        repeat: How many steps are like it.
        flows: How many flows it has.
        hops: The most links that one of them crosses.
        most_flows: The most flows that share one directed link.
        busiest: That link's name.
        seconds: The time of the step alone: the longest of all paths' latencies, and the bytes on the slowest link.
    """

    step: int
    repeat: int
    flows: int
    hops: int
    most_flows: int
    busiest: str
    seconds: float


def link_loads(schedule: Schedule, network: RoutedNetwork, nbytes: float = 1.0) -> tuple[StepLoad, ...]:
    """Lay every step of a schedule over a network.

    The transfers of one step from one endpoint to another are one flow. A step takes as long as the latency of its
    longest path and the bytes of its busiest link; the sum over steps is the time of an execution in lock step,
    which is an upper estimate, for without a barrier steps overlap.

    Args:
        schedule: Any schedule whose ranks and switches the network has.
        network: A cluster, or what else is a `RoutedNetwork`.
        nbytes: S, the size of the vector (see `Collective.vector_blocks`).

    Raises:
        ScheduleError: the network has fewer ranks than the schedule, or lacks one of its switches.
    """
    nodes = place(schedule, network)
    loads = []
    number = 0
    for step in schedule.steps:
        loads.append(_load(number, step, nodes, network, nbytes / schedule.vector_chunks))
        number += step.repeat
    return tuple(loads)


def place(schedule: Schedule, network: RoutedNetwork) -> NDArray[np.int64]:
    """Return the node of each endpoint of a schedule.

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


def _load(number: int, step: Step, nodes: NDArray[np.int64], network: RoutedNetwork, chunk_bytes: float) -> StepLoad:
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
