"""A training step on a cluster: its computation, and its communication on the links that it shares."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from hocket.cluster import Cluster
from hocket.schedule import Schedule
from hocket.timeline import Arrow, Span, Timeline
from hocket.units import format_bytes

from ._fair import Floats, Indices, Usage
from ._graph import StepGraph
from ._loop import run
from ._lower import Lowered, lower
from ._network import Wires
from ._schedule import LinkUse, busiest_links, load_counters
from ._settings import Settings
from ._tasks import LoadTrace, Outcome, SimulationError, Tasks


@dataclass(frozen=True, eq=False)
class StepTiming:
    """When everything of a step happened.

    Attributes:
        graph: What was simulated.
        cluster: Where.
        start_s: float64 per node of the graph.
        end_s: float64 per node of the graph.
        link_nbytes: float64 per link of the cluster.
        capacity_Bps: float64 per link, as the settings have it.
        trace: The loads of links over time, if asked for.
    """

    graph: StepGraph
    cluster: Cluster
    start_s: Floats
    end_s: Floats
    link_nbytes: Floats
    capacity_Bps: Floats
    trace: LoadTrace | None

    @property
    def seconds(self) -> float:
        """The time of the step: from 0 to the last end."""
        return float(self.end_s.max()) if len(self.end_s) else 0.0

    @cached_property
    def compute_s(self) -> Floats:
        """Of every rank how long it computes, float64."""
        return np.array([self.timeline.busy_s(rank, "compute") for rank in range(self.graph.world)])

    @cached_property
    def exposed_s(self) -> Floats:
        """Of every rank how long it communicates while it does not compute, float64."""
        return np.array([self.timeline.exposed_s(rank) for rank in range(self.graph.world)])

    @property
    def idle_share(self) -> float:
        """The part of all ranks' time in which they do not compute, 0 to 1."""
        return 1 - float(self.compute_s.mean()) / self.seconds if self.seconds else 0.0

    def busiest(self, count: int = 5) -> list[LinkUse]:
        """Return the links that were used most, the first of equals first; unused ones are left out."""
        return busiest_links(self.cluster, self.link_nbytes, self.capacity_Bps, self.seconds, count)

    @cached_property
    def timeline(self) -> Timeline:
        """Spans of every rank; a collective has one per rank, a message an arrow; the busiest links' load over time."""
        spans, arrows = [], []
        for work in self.graph.computes:
            for row, rank in enumerate(work.ranks.tolist()):
                start, end = self._times(work.first + row, work.first + row)
                if end > start:
                    spans.append(Span(rank, work.stream, work.name, start, end, kind="compute"))
        for group in self.graph.collects:
            for row, rank in enumerate(group.ranks.tolist()):
                start, end = self._times(group.first + row, group.first + len(group.ranks) + row)
                spans.append(Span(rank, group.stream, group.name, start, end, kind="collective", nbytes=group.nbytes))
        for sent in self.graph.sends:
            ends = zip(sent.source.tolist(), sent.destination.tolist(), sent.nbytes.tolist(), strict=True)
            for row, (source, destination, nbytes) in enumerate(ends):
                start, end = self._times(sent.first + row, sent.first + row)
                spans.append(Span(source, "send", sent.name, start, end, kind="collective", nbytes=nbytes))
                spans.append(Span(destination, "receive", sent.name, start, end, kind="collective", nbytes=nbytes))
                arrows.append(Arrow(sent.name, source, "send", start, destination, "receive", end))
        counters = load_counters(self.cluster, self.trace, self.busiest(8)) if self.trace else ()
        return Timeline(f"a step on {self.cluster.name}", tuple(spans), tuple(arrows), counters)

    def _times(self, first: int, last: int) -> tuple[float, float]:
        return float(self.start_s[first]), float(self.end_s[last])

    def table(self) -> list[tuple[str, str]]:
        """Return what people ask first: step time, computation, exposed communication, idle share, busiest links."""
        rows = [
            ("step time", f"{self.seconds * 1e3:.3f} ms"),
            ("computation (mean of ranks)", f"{self.compute_s.mean() * 1e3:.3f} ms"),
            ("exposed communication (mean, worst)", _both(self.exposed_s)),
            ("idle share", f"{self.idle_share:.1%}"),
        ]
        return rows + [
            (f"busy link {use.name}", f"{use.busy:.1%}, {use.nbytes / 1e6:.3f} MB") for use in self.busiest(3)
        ]


def _both(values: Floats) -> str:
    return f"{values.mean() * 1e3:.3f} ms, {values.max() * 1e3:.3f} ms"


def simulate_step(
    graph: StepGraph,
    cluster: Cluster,
    *,
    settings: Settings | None = None,
    seed: int = 0,
    slowdown: ArrayLike | None = None,
    trace: bool = False,
    known: "LoweredCollectives | None" = None,
) -> StepTiming:
    """Run a training step on a simulated cluster; rank r of the step runs on rank r of the cluster.

    All collectives and messages share the cluster's links at every moment, so that what is concurrent slows each other.
    Computation takes the time that the graph says, whatever is communicated. Equal arguments give equal results to the
    last bit.

    Args:
        graph: What to run.
        cluster: Where.
        settings: What to count besides latency and bandwidth.
        seed: Of ECMP's hash.
        slowdown: Of every rank, or of all alike, what its computation is multiplied by: stragglers, mixed devices.
        trace: Keep the load of all links over time, for `StepTiming.timeline`.
        known: What earlier steps on this cluster, with these settings and seed, have brought collectives down to; what
            this one does is added.

    Raises:
        SimulationError: if the step does not fit the cluster, before anything runs.
        ClusterError: if no path joins two ranks that talk.
    """
    _fits(graph, cluster)
    counted = settings or Settings()
    wires = Wires(cluster, counted, seed)
    factor = np.broadcast_to(np.asarray(1.0 if slowdown is None else slowdown, dtype=np.float64), (graph.world,))
    parts = _Parts(graph, cluster, wires, factor, {} if known is None else known)
    loads = LoadTrace() if trace else None
    outcome: Outcome = run(parts.tasks(), wires.capacity_Bps, trace=loads)
    nodes = slice(0, graph.nodes)
    return StepTiming(
        graph, cluster, outcome.start_s[nodes], outcome.end_s[nodes], outcome.link_nbytes, wires.capacity_Bps, loads
    )


def _fits(graph: StepGraph, cluster: Cluster) -> None:
    if graph.world > cluster.world:
        raise SimulationError(
            f"the step has {graph.world} ranks and {cluster.name} has places for {cluster.world}; "
            "take a larger cluster or a smaller plan"
        )
    _switches_serve(graph, cluster)
    if graph.memory_nbytes is None:
        return
    there = cluster.memory_nbytes[cluster.ranks[: graph.world]]
    short = np.flatnonzero((there > 0) & (graph.memory_nbytes > there))
    if len(short):
        rank = int(short[0])
        raise SimulationError(
            f"rank {rank} needs {format_bytes(int(graph.memory_nbytes[rank]))} and its device has "
            f"{format_bytes(int(there[rank]))} ({len(short)} ranks are short); shard more, or take smaller batches"
        )


def _switches_serve(graph: StepGraph, cluster: Cluster) -> None:
    """Refuse more groups at a switch than it serves; one that it lacks or that cannot reduce is refused later."""
    groups: dict[str, set[bytes]] = {}
    for collect in graph.collects:
        for name in collect.schedule.switches:
            groups.setdefault(name, set()).add(collect.ranks.tobytes())
    able = {cluster.node_names[node]: reduction.groups for node, reduction in cluster.reductions.items()}
    for name, found in groups.items():
        if len(found) > able.get(name, len(found)):
            raise SimulationError(
                f"{len(found)} groups of ranks reduce in {name} and it serves {able[name]}; "
                "let some use an algorithm without switches"
            )


LoweredCollectives = dict[tuple[int, float, bytes], tuple[Lowered, Schedule]]
"""By a schedule, bytes and ranks; the schedule is kept, so that no other has its place."""


class _Parts:
    """Puts the graph's nodes and the transfers of its collectives into one set of tasks."""

    def __init__(
        self, graph: StepGraph, cluster: Cluster, wires: Wires, factor: Floats, known: LoweredCollectives
    ) -> None:
        self._graph, self._cluster, self._wires = graph, cluster, wires
        self._count = graph.nodes
        self._delay = [np.zeros(graph.nodes)]
        self._nbytes = [np.zeros(graph.nodes)]
        self._weight, self._limit = [np.ones(graph.nodes)], [np.full(graph.nodes, np.inf)]
        self._server = [np.full(graph.nodes, -1, dtype=np.int64)]
        self._channel = [np.full(graph.nodes, -1, dtype=np.int64)]
        self._channels = 0
        self._owner: list[Indices] = []
        self._links: list[Indices] = []
        self._shares: list[Floats] = []
        self._edges = list(graph.edges)
        for work in graph.computes:
            rows = slice(work.first, work.first + len(work.ranks))
            self._delay[0][rows] = work.seconds * factor[work.ranks]
        self._add_sends()
        plain = wires.settings == Settings()
        for group in graph.collects:
            given = np.empty(len(group.ranks), dtype=np.int64)
            given[group.order] = group.ranks
            schedule, nbytes, scale = group.schedule, group.nbytes, 1.0
            if plain and not schedule.switches and nbytes >= 0:  # it is brought down once, with a byte for each chunk
                nbytes, scale = float(schedule.vector_chunks), nbytes / schedule.vector_chunks
            key = (id(schedule), nbytes, given.tobytes())
            if key not in known:
                known[key] = lower(schedule, cluster, nbytes, wires.settings, ranks=given, seed=wires.seed), schedule
            self._add_collective(known[key][0], given, group.first, group.ranks, scale)

    def _add_sends(self) -> None:
        sends = self._graph.sends
        if not sends:
            return
        ranks = self._cluster.ranks
        node = np.concatenate([sent.first + np.arange(len(sent.source)) for sent in sends])
        sizes = np.concatenate([sent.nbytes for sent in sends])
        source = np.concatenate([sent.source for sent in sends])
        destination = np.concatenate([sent.destination for sent in sends])
        messages = self._wires.messages(ranks[source], ranks[destination], sizes)
        self._delay[0][node], self._nbytes[0][node] = messages.delay_s, sizes
        self._weight[0][node], self._limit[0][node] = messages.weight, messages.limit_Bps
        pairs, self._channel[0][node] = np.unique(source * self._graph.world + destination, return_inverse=True)
        self._channels = len(pairs)
        self._own(node, messages.usage)

    def _own(self, task: Indices, usage: Usage) -> None:
        self._owner.append(np.repeat(task, np.diff(usage.offsets)))
        self._links.append(usage.links)
        self._shares.append(usage.shares)

    def _add_collective(self, lowered: Lowered, given: Indices, first: int, ranks: Indices, scale: float) -> None:
        """Its transfers, each between its ranks' entries and exits."""
        tasks, flows, offset = lowered.tasks, lowered.flows, self._count
        count = len(tasks)
        self._count += count
        self._delay.append(tasks.delay_s)
        self._nbytes.append(tasks.nbytes * scale)
        self._weight.append(np.ones(count) if tasks.weight is None else tasks.weight)
        self._limit.append(np.full(count, np.inf) if tasks.limit_Bps is None else tasks.limit_Bps)
        server = np.full(count, -1, dtype=np.int64) if tasks.server is None else tasks.server
        # One rank's reductions are one after the other over all collectives, so servers go by the step's ranks.
        self._server.append(np.where(server >= 0, given[np.maximum(server, 0)], -1))
        assert tasks.channel is not None
        self._channel.append(np.where(tasks.channel >= 0, tasks.channel + self._channels, -1))
        self._channels += int(tasks.channel.max(initial=-1)) + 1
        self._edges.append((tasks.before + offset, tasks.after + offset))
        self._own(offset + np.arange(count), tasks.usage)
        pairs = []
        for end in (flows.source, flows.destination):
            here = np.flatnonzero(end < len(given))
            pairs.append((given[end[here]], flows.task[here]))
        if tasks.server is not None:
            reducing = np.flatnonzero(tasks.server >= 0)
            pairs.append((given[tasks.server[reducing]], reducing))
        rank = np.concatenate([pair[0] for pair in pairs])
        task = np.concatenate([pair[1] for pair in pairs])
        place = np.searchsorted(ranks, rank)
        self._edges.append((first + place, offset + task))
        self._edges.append((offset + task, first + len(ranks) + place))
        everyone = np.arange(len(ranks))
        self._edges.append((first + everyone, first + len(ranks) + everyone))

    def tasks(self) -> Tasks:
        """All of them."""
        none = np.zeros(0, dtype=np.int64)
        owner, links = np.concatenate(self._owner or [none]), np.concatenate(self._links or [none])
        usage = Usage.of(owner, links, np.concatenate(self._shares or [np.zeros(0)]), self._count)
        server = np.concatenate(self._server)
        return Tasks(
            delay_s=np.concatenate(self._delay),
            nbytes=np.concatenate(self._nbytes),
            usage=usage,
            before=np.concatenate([edge[0] for edge in self._edges] or [none]),
            after=np.concatenate([edge[1] for edge in self._edges] or [none]),
            weight=np.concatenate(self._weight),
            limit_Bps=np.concatenate(self._limit),
            server=server if (server >= 0).any() else None,
            congestion=self._wires.settings.congestion,
            channel=np.concatenate(self._channel),
        )
