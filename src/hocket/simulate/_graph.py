"""`StepGraph`: one training step as compute, collectives and messages with dependencies, per rank and stream."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hocket.schedule import Schedule

from ._fair import Floats, Indices
from ._tasks import SimulationError


@dataclass(frozen=True, eq=False)
class Work:
    """Something that was added to a graph, for later work to wait for.

    Attributes:
        ranks: int64, ascending: where it ends.
        nodes: int64, of each of them the node of the graph that ends there.
    """

    ranks: Indices
    nodes: Indices


@dataclass(frozen=True, eq=False)
class Compute:
    """Spans of computation, one per rank: nodes `first` on."""

    first: int
    ranks: Indices
    seconds: Floats
    stream: str
    name: str


@dataclass(frozen=True, eq=False)
class Collect:
    """A collective over a group: of each rank a node where it enters, `first` on, then one where it leaves."""

    first: int
    ranks: Indices
    order: Indices
    schedule: Schedule
    nbytes: float
    stream: str
    name: str


@dataclass(frozen=True, eq=False)
class Send:
    """Messages from ranks to ranks: nodes `first` on."""

    first: int
    source: Indices
    destination: Indices
    nbytes: Floats
    stream: str
    name: str


class StepGraph:
    """One training step of all ranks.

    Work is added in program order. On each rank, work of one stream happens in the order in which it was added; streams
    run side by side, and `after` joins them: on every rank, new work waits for the parts of `after` that end there.

    Args:
        world: How many ranks take part.
        memory_nbytes: What each rank needs, or all alike; a cluster whose devices have less refuses the step.
    """

    def __init__(self, world: int, *, memory_nbytes: ArrayLike | None = None) -> None:
        if world < 1:
            raise SimulationError(f"a step of {world} ranks; give 1 or more")
        self.world = world
        self.memory_nbytes = None
        if memory_nbytes is not None:
            self.memory_nbytes = np.broadcast_to(np.asarray(memory_nbytes, dtype=np.float64), (world,))
        self.computes: list[Compute] = []
        self.collects: list[Collect] = []
        self.sends: list[Send] = []
        self.edges: list[tuple[Indices, Indices]] = []
        self.nodes = 0
        self._last: dict[str, Indices] = {}

    def compute(
        self,
        ranks: int | Sequence[int] | Indices | None,
        seconds: ArrayLike,
        *,
        stream: str = "compute",
        name: str = "compute",
        after: Iterable[Work] = (),
    ) -> Work:
        """Add computation on some ranks, or on all (None).

        Args:
            ranks: Where.
            seconds: How long, of each or of all alike.
            stream: On which it runs.
            name: For the timeline.
            after: What it waits for besides the stream.

        Raises:
            SimulationError: if a rank is not there, or twice, or a time is negative.
        """
        where, order = self._group(ranks)
        taken = np.broadcast_to(np.asarray(seconds, dtype=np.float64), (len(where),))[order]
        if len(taken) and not (taken >= 0).all():
            raise SimulationError(f"{name}: {taken.min()} s of computation; give 0 or more")
        first = self._nodes(len(where))
        work = Work(where, first + np.arange(len(where)))
        self._join(work, stream, after)
        self.computes.append(Compute(first, where, taken, stream, name))
        self._end(work, stream)
        return work

    def collective(
        self,
        schedule: Schedule,
        nbytes: float,
        *,
        ranks: Sequence[int] | Indices | None = None,
        stream: str = "network",
        name: str = "",
        after: Iterable[Work] = (),
    ) -> Work:
        """Add a collective; each rank enters when it is ready, and goes on when all of its own messages are done.

        Args:
            schedule: Its algorithm.
            nbytes: S, of the vector (see `Collective.vector_blocks`).
            ranks: Of every rank of the schedule the rank of the step that plays it; the first ones if not given.
            stream: On which it runs.
            name: For the timeline; the collective's if empty.
            after: What it waits for besides the stream.

        Raises:
            SimulationError: if the group does not fit the schedule or the step.
        """
        given = np.arange(schedule.world) if ranks is None else np.asarray(ranks, dtype=np.int64)
        if len(given) != schedule.world:
            raise SimulationError(f"{schedule.name} is for {schedule.world} ranks and the group has {len(given)}")
        where, order = self._group(given)
        first = self._nodes(2 * len(where))
        self._join(Work(where, first + np.arange(len(where))), stream, after)
        work = Work(where, first + len(where) + np.arange(len(where)))
        label = name or f"{schedule.collective.kind} ({schedule.name})"
        self.collects.append(Collect(first, where, order, schedule, nbytes, stream, label))
        self._end(work, stream)
        return work

    def send(
        self,
        source: int | Sequence[int] | Indices,
        destination: int | Sequence[int] | Indices,
        nbytes: ArrayLike,
        *,
        stream: str = "",
        name: str = "send",
        after: Iterable[Work] = (),
    ) -> Work:
        """Add messages; they wait at their sources only, and what waits for them may do so at their destinations.

        Args:
            source: Of every message the rank that sends.
            destination: Of every message the rank that receives; each at most once.
            nbytes: Of each or of all alike.
            stream: On which the sources' messages follow each other; with "" they do not.
            name: For the timeline.
            after: What the sources wait for besides the stream.

        Raises:
            SimulationError: if a rank is not there, or receives twice, or sends to itself.
        """
        ends, order = self._group(np.atleast_1d(np.asarray(destination, dtype=np.int64)))
        starts = np.broadcast_to(np.atleast_1d(np.asarray(source, dtype=np.int64)), (len(ends),))[order]
        sizes = np.broadcast_to(np.asarray(nbytes, dtype=np.float64), (len(ends),))[order]
        if (starts < 0).any() or (starts >= self.world).any():
            raise SimulationError(f"{name}: a source outside of ranks 0..{self.world - 1}")
        if (starts == ends).any():
            raise SimulationError(f"{name}: rank {int(starts[starts == ends][0])} sends to itself; leave it out")
        first = self._nodes(len(ends))
        nodes = first + np.arange(len(ends))
        by_source = np.argsort(starts, kind="stable")
        self._join(Work(starts[by_source], nodes[by_source]), stream, after)
        self.sends.append(Send(first, starts, ends, sizes, stream, name))
        if stream:
            self._end(Work(starts, nodes), stream)
        return Work(ends, nodes)

    def _group(self, ranks: int | Sequence[int] | Indices | None) -> tuple[Indices, Indices]:
        """Ranks in ascending order, and the order that makes them so."""
        if ranks is None:
            return np.arange(self.world), np.arange(self.world)
        given = np.atleast_1d(np.asarray(ranks, dtype=np.int64))
        order = np.argsort(given, kind="stable")
        where = given[order]
        if len(where) and (where[0] < 0 or where[-1] >= self.world):
            raise SimulationError(f"rank {int(where[-1] if where[0] >= 0 else where[0])} is not in 0..{self.world - 1}")
        if (where[1:] == where[:-1]).any():
            raise SimulationError(f"rank {int(where[:-1][where[1:] == where[:-1]][0])} is named twice")
        return where, order

    def _nodes(self, count: int) -> int:
        self.nodes += count
        return self.nodes - count

    def _join(self, work: Work, stream: str, after: Iterable[Work]) -> None:
        if stream in self._last:
            before = self._last[stream][work.ranks]
            self.edges.append((before[before >= 0], work.nodes[before >= 0]))
        for other in after:
            if not len(other.ranks):
                continue
            at = np.minimum(np.searchsorted(other.ranks, work.ranks), len(other.ranks) - 1)
            met = other.ranks[at] == work.ranks
            self.edges.append((other.nodes[at[met]], work.nodes[met]))

    def _end(self, work: Work, stream: str) -> None:
        self._last.setdefault(stream, np.full(self.world, -1, dtype=np.int64))[work.ranks] = work.nodes
