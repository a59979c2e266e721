"""A schedule on a cluster as tasks: what waits for what, and what goes over which links.

A transfer waits for every transfer of an earlier step that touches one of its chunks at its source or destination. Of
those only the latest step's have to be named for each chunk, as they have waited for the earlier ones themselves.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hocket.cluster import Cluster
from hocket.schedule import Schedule, Step

from ._fair import Floats, Indices, Usage, weighted_count
from ._network import Wires
from ._reduce import Fused, fuse
from ._settings import Settings
from ._tasks import SimulationError, Tasks
from ._touch import Touched


@dataclass(frozen=True, eq=False)
class Flows:
    """The messages of a schedule: the transfers of one step from one endpoint to another are one."""

    step: Indices  # int64, repetitions counted
    source: Indices  # int64, endpoint
    destination: Indices  # int64, endpoint
    nbytes: Floats  # float64
    task: Indices  # int64, of every message the task that carries it; several have one where switches reduce


@dataclass(frozen=True, eq=False)
class Lowered:
    """Tasks, and the messages that they carry out."""

    tasks: Tasks
    flows: Flows


def place(schedule: Schedule, cluster: Cluster, ranks: Indices | None) -> Indices:
    """Return the node of every endpoint.

    Raises:
        SimulationError: if the schedule does not fit the cluster or the group, saying how.
    """
    group = np.arange(schedule.world) if ranks is None else np.asarray(ranks, dtype=np.int64)
    if len(group) != schedule.world:
        raise SimulationError(
            f"{schedule.name} is for {schedule.world} ranks and the group has {len(group)}; build it for {len(group)}"
        )
    if len(group) and (group.min() < 0 or group.max() >= cluster.world):
        raise SimulationError(
            f"{schedule.name} needs rank {int(group.max())} and {cluster.name} has ranks 0..{cluster.world - 1}; "
            "take a larger cluster or a smaller world"
        )
    if len(np.unique(group)) != len(group):
        raise SimulationError("the group names a rank twice; every rank of a schedule runs at its own place")
    try:
        switches = [cluster.node(name) for name in schedule.switches]
    except KeyError as error:
        raise SimulationError(f"{schedule.name} reduces in a switch that is not there: {error}") from None
    return np.concatenate([cluster.ranks[group], np.array(switches, dtype=np.int64)])


def lower(
    schedule: Schedule,  # what to lower
    cluster: Cluster,  # where it runs
    nbytes: float,  # S, of the vector (see `Collective.vector_blocks`)
    settings: Settings,  # what to count
    *,
    ranks: Indices | None = None,  # of every rank of the schedule the rank of the cluster; the first ones if not given
    seed: int = 0,  # of ECMP
    ready_s: Floats | None = None,  # of every rank the time before which it takes no part
) -> Lowered:
    """Return a schedule as tasks. Raises SimulationError if the schedule does not fit the cluster, or is too large."""
    if settings.pieces > 1:
        schedule = schedule.merged().split(settings.pieces)
    nodes = place(schedule, cluster, ranks)
    if nbytes < 0:
        raise SimulationError(f"{nbytes} bytes are less than none")
    wires, chunk_nbytes = Wires(cluster, settings, seed), nbytes / schedule.vector_chunks
    fused = fuse(schedule, nodes, wires, chunk_nbytes) if schedule.switches else None
    return _Lowering(schedule, nodes, wires, chunk_nbytes, fused, ready_s).all()


class _Merged(NamedTuple):
    """Rows of a step, and the messages that they make: `message` of every row, `first` row of every message."""

    source: Indices
    destination: Indices
    length: Indices
    message: Indices
    first: Indices
    member: Indices
    size: Floats
    adds: Floats


class _Lowering:
    def __init__(
        self,
        schedule: Schedule,
        nodes: Indices,
        wires: Wires,
        chunk_nbytes: float,
        fused: Fused | None,
        ready_s: Floats | None,
    ) -> None:
        self._schedule, self._nodes, self._wires = schedule, nodes, wires
        self._chunk_nbytes, self._fused, self._ready = chunk_nbytes, fused, ready_s
        self._touched = Touched(schedule)
        self._count = len(fused) if fused else 0  # tasks so far; those of switches come first
        self._edges: list[tuple[Indices, Indices]] = []
        self._parts: list[tuple[int, Indices, Indices, Floats]] = []  # plain messages, by first task
        self._flows: list[tuple[Indices, Indices, Indices, Floats, Indices]] = []
        self._reduces: list[tuple[int, Indices, Floats]] = []
        self._barrier: int | None = None

    def all(self) -> Lowered:
        number = row = 0
        for step in self._schedule.steps:
            merged = None
            for times in range(step.repeat):
                start = (step.start + np.int64(times) * step.shift) % self._schedule.chunks
                if merged is None or self._fused is not None:
                    merged = self._merge(step, row)
                self._one(number, step, start, merged)
                number, row = number + 1, row + len(step)
        return self._finish()

    def _merge(self, step: Step, row: int) -> _Merged:
        """Return the messages of a step: rows between the same endpoints, and of the same stream where switches reduce.

        Pieces of messages stay what they are: rows of their own.
        """
        source, destination = step.source.astype(np.int64), step.destination.astype(np.int64)
        length = (step.stop - step.start).astype(np.int64)
        key = source * self._schedule.endpoints + destination
        if self._wires.settings.pieces > 1 and self._fused is None:
            key = np.arange(len(step))
        member = np.full(len(step), -1, dtype=np.int64)
        if self._fused is not None:
            member = self._fused.task_of_row[row : row + len(step)]
            key = key * (len(self._fused) + 1) + member + 1
        _, first, message = np.unique(key, return_index=True, return_inverse=True)
        size = weighted_count(message, length.astype(np.float64), len(first)) * self._chunk_nbytes
        adds = weighted_count(message, (step.reduce * length).astype(np.float64), len(first)) * self._chunk_nbytes
        return _Merged(source, destination, length, message, first, member[first], size, adds)

    def _one(self, number: int, step: Step, start: Indices, merged: _Merged) -> None:
        """One step: number its messages, find what they wait for, and leave their marks."""
        if not len(step):
            return
        first, size = merged.first, merged.size
        source, destination = merged.source[first], merged.destination[first]
        plain = merged.member < 0
        task = np.where(plain, self._count + np.cumsum(plain) - 1, merged.member)
        kept = np.flatnonzero(plain)
        self._parts.append((self._count, source[kept], destination[kept], size[kept]))
        self._count += len(kept)
        self._flows.append((np.full(len(first), number), source, destination, size, task))
        done = task
        if self._wires.settings.reduce_s_per_byte:
            done = self._add_reductions(task, destination, np.where(plain, merged.adds, 0.0))
        entering, leaving = task[merged.message], done[merged.message]
        before, after, self._count = self._touched.step(
            np.concatenate([merged.source, merged.destination]),
            np.concatenate([start, start]),
            np.concatenate([merged.length, merged.length]),
            np.concatenate([entering, entering]),
            np.concatenate([entering, leaving]),  # at the destination what comes next waits for the reduction, too
            self._count,
        )
        self._edges.append((before, after))
        if self._wires.settings.lockstep:
            self._synchronise(np.unique(task), np.unique(done))

    def _synchronise(self, task: Indices, done: Indices) -> None:
        if self._barrier is not None:
            self._edges.append((np.full(len(task), self._barrier), task))
        self._barrier = self._count
        self._edges.append((done, np.full(len(done), self._barrier)))
        self._count += 1

    def _add_reductions(self, task: Indices, destination: Indices, adds: Floats) -> Indices:
        """Return a task per message reduced at a rank, which does one after the other; what later steps wait for."""
        here = np.flatnonzero((adds > 0) & (destination < self._schedule.world))
        done = task.copy()
        done[here] = self._count + np.arange(len(here))
        self._edges.append((task[here], done[here]))
        self._reduces.append((self._count, destination[here], adds[here]))
        self._count += len(here)
        return done

    def _finish(self) -> Lowered:
        count = self._count
        delay, nbytes, weight = np.zeros(count), np.zeros(count), np.ones(count)
        limit, earliest = np.full(count, np.inf), np.zeros(count)
        server = np.full(count, -1, dtype=np.int64)
        task = np.concatenate([part[0] + np.arange(len(part[3])) for part in self._parts] or [_NONE])
        source = np.concatenate([part[1] for part in self._parts] or [_NONE])
        destination = np.concatenate([part[2] for part in self._parts] or [_NONE])
        sizes = np.concatenate([part[3] for part in self._parts] or [np.zeros(0)])
        messages = self._wires.messages(self._nodes[source], self._nodes[destination], sizes)
        delay[task], nbytes[task], weight[task], limit[task] = (
            messages.delay_s,
            sizes,
            messages.weight,
            messages.limit_Bps,
        )
        owner = np.repeat(task, np.diff(messages.usage.offsets))
        links, shares = messages.usage.links, messages.usage.shares
        if self._fused is not None and len(self._fused):
            fused, rows = self._fused, np.arange(len(self._fused))
            delay[rows], nbytes[rows], limit[rows] = fused.delay_s, fused.nbytes, fused.limit_Bps
            owner = np.concatenate([np.repeat(rows, np.diff(fused.usage.offsets)), owner])
            links = np.concatenate([fused.usage.links, links])
            shares = np.concatenate([fused.usage.shares, shares])
        for first, destinations, adds in self._reduces:
            rows = first + np.arange(len(adds))
            delay[rows], server[rows] = adds * self._wires.settings.reduce_s_per_byte, destinations
        before = np.concatenate([edge[0] for edge in self._edges] or [_NONE])
        after = np.concatenate([edge[1] for edge in self._edges] or [_NONE])
        flows = Flows(*(np.concatenate([part[column] for part in self._flows] or [_NONE]) for column in range(5)))
        if self._ready is not None:
            for ends in (flows.source, flows.destination):
                at_rank = ends < self._schedule.world
                np.maximum.at(earliest, flows.task[at_rank], self._ready[ends[at_rank]])
        # A connection per pair of endpoints carries its messages one after the other.
        channel = np.full(count, -1, dtype=np.int64)
        _, channel[task] = np.unique(source * self._schedule.endpoints + destination, return_inverse=True)
        tasks = Tasks(
            delay_s=delay,
            nbytes=nbytes,
            usage=Usage.of(owner, links, shares, count),
            before=before,
            after=after,
            earliest_s=earliest,
            weight=weight,
            limit_Bps=limit,
            server=server if self._reduces else None,
            congestion=self._wires.settings.congestion,
            channel=channel,
        )
        return Lowered(tasks, flows)


_NONE = np.zeros(0, dtype=np.int64)
