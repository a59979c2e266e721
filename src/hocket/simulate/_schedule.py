"""How long a collective takes on a cluster: the schedule's own transfers, on its links."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hocket.cluster import Cluster
from hocket.schedule import Schedule
from hocket.timeline import Arrow, Counter, Span, Timeline

from ._fair import Floats, Indices
from ._loop import run
from ._lower import Lowered, lower
from ._network import Wires
from ._settings import Settings
from ._tasks import LoadTrace


@dataclass(frozen=True)
class LinkUse:
    """What one directed link carried.

    Attributes:
        name: As in `Cluster.link_names`.
        nbytes: What crossed it.
        busy: The part of its capacity that was used from the first start to the last end, 0 to 1.
    """

    name: str
    nbytes: float
    busy: float


@dataclass(frozen=True, eq=False)
class ScheduleTiming:
    """When every message of a schedule moved.

    Attributes:
        schedule: What was simulated.
        cluster: Where.
        nbytes: S, the size of the vector.
        step: int64 per message, repetitions counted.
        source: int64 per message, endpoint.
        destination: int64 per message, endpoint.
        message_nbytes: float64.
        start_s: float64, when it had all that it waits for.
        moving_s: float64, when its first byte moved.
        end_s: float64, when its last byte had arrived.
        ended_s: When everything was done, reductions too.
        link_nbytes: float64 per link of the cluster.
        capacity_Bps: float64 per link, as the settings have it.
        trace: The loads of links over time, if asked for.
    """

    schedule: Schedule
    cluster: Cluster
    nbytes: float
    step: Indices
    source: Indices
    destination: Indices
    message_nbytes: Floats
    start_s: Floats
    moving_s: Floats
    end_s: Floats
    ended_s: float
    link_nbytes: Floats
    capacity_Bps: Floats
    trace: LoadTrace | None

    @property
    def seconds(self) -> float:
        """From the first message's start to the end of all."""
        return self.ended_s - (float(self.start_s.min()) if len(self.start_s) else 0.0)

    @property
    def algbw_Bps(self) -> float:
        """S by the time, as nccl-tests define it; 0 if it takes no time."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def busbw_Bps(self) -> float:
        """Algbw by nccl-tests' factor of the collective."""
        return self.algbw_Bps * self.schedule.collective.bus_factor

    def finish_s(self) -> Floats:
        """Of every rank when the last message from or to it had arrived, float64."""
        ends = np.zeros(self.schedule.endpoints)
        np.maximum.at(ends, self.source, self.end_s)
        np.maximum.at(ends, self.destination, self.end_s)
        return ends[: self.schedule.world]

    def busiest(self, count: int = 5) -> list[LinkUse]:
        """Return the links that were used most, the first of equals first; unused ones are left out."""
        return busiest_links(self.cluster, self.link_nbytes, self.capacity_Bps, self.seconds, count)

    def timeline(self, *, counters: int = 8) -> Timeline:
        """Return the messages as spans of senders and arrows to receivers, and the busiest links' load over time.

        Args:
            counters: How many links have their load drawn, if the simulation kept a trace.
        """
        spans, arrows = [], []
        label = self.schedule.endpoint
        columns = (self.step, self.source, self.destination, self.message_nbytes, self.start_s, self.end_s)
        for step, source, destination, nbytes, start, end in zip(*(c.tolist() for c in columns), strict=True):
            name = f"step {step}: {label(source)} to {label(destination)}"
            spans.append(Span(source, "send", name, start, end, kind="transfer", nbytes=nbytes))
            spans.append(Span(destination, "receive", name, start, end, kind="transfer", nbytes=nbytes))
            arrows.append(Arrow(name, source, "send", start, destination, "receive", end))
        names = {rank: f"rank {rank}" for rank in range(self.schedule.world)}
        names |= {self.schedule.world + index: name for index, name in enumerate(self.schedule.switches)}
        return Timeline(
            f"{self.schedule.name} on {self.cluster.name}",
            tuple(spans),
            tuple(arrows),
            load_counters(self.cluster, self.trace, self.busiest(counters)) if self.trace else (),
            names,
        )


def busiest_links(
    cluster: Cluster, link_nbytes: Floats, capacity_Bps: Floats, seconds: float, count: int
) -> list[LinkUse]:
    """Return the links that were used most in so many seconds, the first of equals first; unused ones are left out."""
    busy = link_nbytes / capacity_Bps / (seconds or 1.0)
    return [
        LinkUse(cluster.link_names[link], float(link_nbytes[link]), float(busy[link]))
        for link in np.argsort(-busy, kind="stable")[:count].tolist()
        if link_nbytes[link] > 0
    ]


def load_counters(cluster: Cluster, trace: LoadTrace, links: Sequence[LinkUse]) -> tuple[Counter, ...]:
    """Return the load of some links over time."""
    index = {name: link for link, name in enumerate(cluster.link_names)}
    return tuple(
        Counter(
            f"{use.name} (B/s)", tuple(trace.times_s), tuple(float(load[index[use.name]]) for load in trace.loads_Bps)
        )
        for use in links
    )


def simulate_schedule(
    schedule: Schedule,
    cluster: Cluster,
    nbytes: float,
    *,
    settings: Settings | None = None,
    ranks: Sequence[int] | Indices | None = None,
    seed: int = 0,
    ready_s: Sequence[float] | Floats | None = None,
    trace: bool = False,
) -> ScheduleTiming:
    """Run a schedule on a simulated cluster.

    A transfer waits for every transfer of an earlier step that touches one of its chunks at its source or destination,
    then for the latency of its path, then takes its max-min fair share of the links. Where switches reduce, see
    `_reduce.py`. Equal arguments give equal results to the last bit.

    Args:
        schedule: What to run.
        cluster: Where.
        nbytes: S, the size of the vector in bytes (see `Collective.vector_blocks`).
        settings: What to count besides; nothing if not given.
        ranks: Of every rank of the schedule the rank of the cluster that plays it; the first ones if not given.
        seed: Of ECMP's hash.
        ready_s: Of every rank of the schedule the time before which it takes no part: stragglers, unequal compute.
        trace: Keep the load of all links over time, for `timeline`.

    Raises:
        SimulationError: if the schedule does not fit the cluster, before anything runs.
        ClusterError: if no path joins two ranks that talk.
    """
    counted = settings or Settings()
    group = None if ranks is None else np.asarray(ranks, dtype=np.int64)
    ready = None if ready_s is None else np.asarray(ready_s, dtype=np.float64)
    lowered = lower(schedule, cluster, nbytes, counted, ranks=group, seed=seed, ready_s=ready)
    return _timed(schedule, cluster, nbytes, lowered, Wires(cluster, counted, seed), LoadTrace() if trace else None)


def simulate_sizes(
    schedule: Schedule, cluster: Cluster, sizes: Sequence[float], *, seed: int = 0
) -> Iterator[ScheduleTiming]:
    """Return what `simulate_schedule` does of each of several sizes; the schedule is brought down to transfers once."""
    if schedule.switches or min(sizes, default=0) < 0:  # what switches do depends on the size
        yield from (simulate_schedule(schedule, cluster, nbytes, seed=seed) for nbytes in sizes)
        return
    plain = Settings()
    lowered, wires = lower(schedule, cluster, schedule.vector_chunks, plain, seed=seed), Wires(cluster, plain, seed)
    tasks, flows = lowered.tasks, lowered.flows
    for nbytes in sizes:
        each = nbytes / schedule.vector_chunks
        sized = (
            dataclasses.replace(tasks, nbytes=tasks.nbytes * each),
            dataclasses.replace(flows, nbytes=flows.nbytes * each),
        )
        yield _timed(schedule, cluster, nbytes, Lowered(*sized), wires)


def _timed(
    schedule: Schedule, cluster: Cluster, nbytes: float, lowered: Lowered, wires: Wires, loads: LoadTrace | None = None
) -> ScheduleTiming:
    outcome, flows = run(lowered.tasks, wires.capacity_Bps, trace=loads), lowered.flows
    return ScheduleTiming(
        schedule=schedule,
        cluster=cluster,
        nbytes=nbytes,
        step=flows.step,
        source=flows.source,
        destination=flows.destination,
        message_nbytes=flows.nbytes,
        start_s=outcome.start_s[flows.task],
        moving_s=outcome.moving_s[flows.task],
        end_s=outcome.end_s[flows.task],
        ended_s=outcome.seconds,
        link_nbytes=outcome.link_nbytes,
        capacity_Bps=wires.capacity_Bps,
        trace=loads,
    )
