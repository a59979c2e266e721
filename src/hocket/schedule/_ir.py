"""The schedule: one collective as ordered transfers over chunks, in columns of numpy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._collective import Collective, ScheduleError

Column = NDArray[np.int32]
Flags = NDArray[np.bool_]

_NAME: Final = re.compile(r"[A-Za-z_][\w./:+-]*")


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """Transfers that are concurrent: all read what the steps before have left, then all write.

    Row i moves the chunks `start[i] <= c < stop[i]` from endpoint `source[i]` to the same chunks of
    `destination[i]`, where they are added (`reduce[i]`) or put in place of what was there. Endpoints below the world's
    size are ranks, the others switches. With `repeat` > 1 it stands for that many steps one after the other, the
    chunks of each `shift` (modulo the number of chunks) further than those of the one before.
    """

    source: Column
    destination: Column
    start: Column
    stop: Column
    reduce: Flags
    repeat: int = 1
    shift: int = 0

    def __post_init__(self) -> None:
        if self.repeat == 1:  # nothing is shifted, and nothing is printed
            object.__setattr__(self, "shift", 0)

    @classmethod
    def of(
        cls,
        source: ArrayLike,
        destination: ArrayLike,
        start: ArrayLike = 0,
        stop: ArrayLike | None = None,
        *,
        reduce: ArrayLike,
        repeat: int = 1,
        shift: int = 0,
    ) -> Step:
        """Make a step of numbers or arrays, which are broadcast to one length; `stop` is `start + 1` if left out."""
        first = _column(start)
        last = first + 1 if stop is None else _column(stop)
        given = (np.atleast_1d(_column(source)), _column(destination), first, last, np.asarray(reduce, dtype=np.bool_))
        shape = np.broadcast(*given).shape
        columns: list[NDArray[Any]] = [np.empty(shape, row.dtype) for row in given]  # nobody else can write to copies
        for column, row in zip(columns, given, strict=True):
            column[...] = row
            column.flags.writeable = False
        return cls(columns[0], columns[1], columns[2], columns[3], columns[4], repeat, shift)

    def __len__(self) -> int:
        """Return the number of rows, repetitions not counted."""
        return len(self.source)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Step):
            return NotImplemented
        mine, its = self.columns, other.columns
        return (
            (self.repeat, self.shift) == (other.repeat, other.shift)
            and len(self) == len(other)
            and all(bool(np.array_equal(a, b)) for a, b in zip(mine, its, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]  # as of any value that holds arrays

    @property
    def columns(self) -> tuple[Column, Column, Column, Column, Flags]:
        """source, destination, start, stop, reduce."""
        return self.source, self.destination, self.start, self.stop, self.reduce

    def turn(self, times: int, chunks: int) -> Step:
        """Return the step of repetition `times` by itself."""
        if times == 0 and self.repeat == 1:
            return self
        start = (self.start + np.int64(times) * self.shift) % chunks
        return Step.of(self.source, self.destination, start, start + (self.stop - self.start), reduce=self.reduce)

    def take(self, rows: NDArray[np.intp] | Flags) -> Step:
        """Return the step with some of its rows, in the order given."""
        picked = [column[rows] for column in self.columns]
        return Step.of(*picked[:4], reduce=picked[4], repeat=self.repeat, shift=self.shift)


class Columns(NamedTuple):
    """All transfers of a schedule, repetitions written out; row i of every column is transfer i."""

    step: Column
    source: Column
    destination: Column
    start: Column
    stop: Column
    reduce: Flags


@dataclass(frozen=True, slots=True)
class Schedule:
    """One collective as an ordered list of transfers. A value: frozen, printable, parseable.

    Every endpoint has memory for all `chunks`. A chunk keeps its place: a transfer names the endpoints and the chunks,
    and the same chunks are read and written. Before the first step an endpoint holds what the contract says, switches
    nothing; what is added where nothing was is copied. A transfer waits for every transfer of an earlier step that
    touches one of its chunks at its source or its destination, and for nothing else: steps are an order, no barrier.

    Args:
        name: Name of the algorithm.
        collective: The contract.
        chunks: Number of parts of the data; a multiple of `collective.blocks`.
        steps: See `Step`; those of equal shape may be stored once.
        switches: Names of the endpoints `world`, `world + 1`, ... that hold no data of their own.

    Raises:
        ScheduleError: a row names an endpoint or a chunk that is not there, or sends to itself.
    """

    name: str
    collective: Collective
    chunks: int
    steps: tuple[Step, ...]
    switches: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in (self.name, *self.switches):
            if not _NAME.fullmatch(name):
                raise ScheduleError(f"name {name!r}: use letters, digits and _./:+- after a letter")
        if len(set(self.switches)) != len(self.switches):
            raise ScheduleError(f"switches {', '.join(self.switches)}: a name stands twice")
        blocks = self.collective.blocks
        if max(self.chunks, self.endpoints) >= 1 << 31:
            raise ScheduleError(f"{self.endpoints} endpoints and {self.chunks} chunks: there can be less than 2**31")
        if self.chunks < 1 or self.chunks % blocks:
            raise ScheduleError(f"chunks {self.chunks}: {self.collective} needs a multiple of {blocks}")
        for number, step in enumerate(self.steps):
            _check(number, step, self.endpoints, self.chunks)

    def __str__(self) -> str:
        """Return the schedule as people read it and `parse` reads it back.

        One line for what it is, one for its switches if there are any, one a step and one a transfer::

            schedule ring all_reduce world=2 chunks=2
            step
              0 -> 1 reduce 0
              1 -> 0 reduce 1
        """
        lines = [f"schedule {self.name} {self.collective} chunks={self.chunks}"]
        if self.switches:
            lines.append("switches " + " ".join(self.switches))
        names = [self.endpoint(number) for number in range(self.endpoints)]
        for step in self.steps:
            lines.append("step" if step.repeat == 1 else f"step repeat={step.repeat} shift={step.shift}")
            for source, destination, start, stop, reduce in zip(*(c.tolist() for c in step.columns), strict=True):
                chunks = str(start) if stop == start + 1 else f"{start}:{stop}"
                lines.append(f"  {names[source]} -> {names[destination]} {'reduce' if reduce else 'copy'} {chunks}")
        return "\n".join(lines) + "\n"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.collective.world

    @property
    def endpoints(self) -> int:
        """Number of ranks and switches."""
        return self.world + len(self.switches)

    @property
    def step_count(self) -> int:
        """Number of steps, repetitions counted."""
        return sum(step.repeat for step in self.steps)

    @property
    def transfer_count(self) -> int:
        """Number of transfers, repetitions counted."""
        return sum(step.repeat * len(step) for step in self.steps)

    @property
    def vector_chunks(self) -> int:
        """How many chunks S is, see `Collective.vector_blocks`."""
        return self.chunks // self.collective.blocks * self.collective.vector_blocks

    def endpoint(self, number: int) -> str:
        """Return the name of an endpoint: a rank's number or a switch's name."""
        return str(number) if number < self.world else self.switches[number - self.world]

    def describe(self, number: int) -> str:
        """Return an endpoint's name for people: "rank 3" or "switch leaf0"."""
        return f"{'rank' if number < self.world else 'switch'} {self.endpoint(number)}"

    def each_step(self) -> Iterator[Step]:
        """Return the steps in order, repetitions written out one after the other."""
        for step in self.steps:
            for times in range(step.repeat):
                yield step.turn(times, self.chunks)

    def columns(self) -> Columns:
        """Return all transfers with repetitions written out, 21 bytes each."""
        parts = list(self.each_step())
        label = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
        if not parts:
            empty = np.empty(0, np.int32)
            return Columns(label, empty, empty, empty, empty, np.empty(0, np.bool_))
        source, destination, start, stop, reduce = (
            np.concatenate([part.columns[i] for part in parts]) for i in range(5)
        )
        return Columns(
            label,
            source.astype(np.int32),
            destination.astype(np.int32),
            start.astype(np.int32),
            stop.astype(np.int32),
            reduce.astype(np.bool_),
        )

    def part(self, endpoint: int) -> Schedule:
        """Return what one endpoint takes part in; the other rows are left out."""
        steps = (step.take((step.source == endpoint) | (step.destination == endpoint)) for step in self.steps)
        return Schedule(self.name, self.collective, self.chunks, tuple(steps), self.switches)

    def merged(self) -> Schedule:
        """Return the same with neighbouring chunks that go from one endpoint to another in one step as one transfer."""
        steps = (step if step.repeat > 1 else _merge(step) for step in self.steps)
        return Schedule(self.name, self.collective, self.chunks, tuple(steps), self.switches)

    def split(self, pieces: int) -> Schedule:
        """Return the same with every transfer cut in `pieces` that follow each other, and chunks as much smaller.

        The first piece can be on its way in the next step while the second is still in this one.
        """
        steps = []
        for step in self.steps:
            length = step.stop - step.start
            start = (step.start * pieces)[:, None] + length[:, None] * np.arange(pieces)
            source, destination, reduce = (np.repeat(c, pieces) for c in (step.source, step.destination, step.reduce))
            steps.append(
                Step.of(
                    source,
                    destination,
                    start.ravel(),
                    (start + length[:, None]).ravel(),
                    reduce=reduce,
                    repeat=step.repeat,
                    shift=step.shift * pieces,
                )
            )
        return Schedule(self.name, self.collective, self.chunks * pieces, tuple(steps), self.switches)

    def sent(self) -> tuple[Fraction, ...]:
        """Return what each endpoint sends, in units of S (see `Collective.vector_blocks`), exactly."""
        return self._moved(0)

    def received(self) -> tuple[Fraction, ...]:
        """Return what each endpoint receives, in units of S, exactly."""
        return self._moved(1)

    def _moved(self, side: int) -> tuple[Fraction, ...]:
        total = np.zeros(self.endpoints, np.int64)
        for step in self.steps:
            np.add.at(total, step.columns[side], (step.stop - step.start).astype(np.int64) * step.repeat)
        return tuple(Fraction(int(chunks), self.vector_chunks) for chunks in total)


def _column(numbers: ArrayLike) -> Column:
    try:
        return np.asarray(numbers, dtype=np.int32)
    except OverflowError as error:
        raise ScheduleError(f"endpoints and chunks are numbers below 2**31: {error}") from None


def _merge(step: Step) -> Step:
    """Join rows of one source, destination and verb whose ranges follow each other, and sort them."""
    if not len(step):
        return step
    order = np.lexsort((step.start, step.reduce, step.destination, step.source))
    source, destination, start, stop, reduce = (column[order] for column in step.columns)
    joins = (
        (source[1:] == source[:-1])
        & (destination[1:] == destination[:-1])
        & (reduce[1:] == reduce[:-1])
        & (start[1:] == stop[:-1])
    )
    first = np.flatnonzero(np.r_[True, ~joins])
    last = np.r_[first[1:], len(step)] - 1
    return Step.of(source[first], destination[first], start[first], stop[last], reduce=reduce[first])


def _check(number: int, step: Step, endpoints: int, chunks: int) -> None:
    """Raise ScheduleError for the first row that is out of bounds."""
    where = f"step {number}"
    if step.repeat < 1:
        raise ScheduleError(f"{where}: repeat={step.repeat}; give 1 or more")
    for row in np.flatnonzero(
        (step.source < 0) | (step.source >= endpoints) | (step.destination < 0) | (step.destination >= endpoints)
    ):
        raise ScheduleError(
            f"{where}, transfer {row}: {step.source[row]} -> {step.destination[row]} names an endpoint that is not "
            f"there; they are 0 to {endpoints - 1}"
        )
    for row in np.flatnonzero(step.source == step.destination):
        raise ScheduleError(f"{where}, transfer {row}: endpoint {step.source[row]} sends to itself; leave it out")
    for row in np.flatnonzero((step.start < 0) | (step.stop > chunks) | (step.start >= step.stop)):
        raise ScheduleError(
            f"{where}, transfer {row}: chunks {step.start[row]}:{step.stop[row]} are not a range within 0:{chunks}"
        )
    if step.repeat > 1 and len(step):
        length = step.stop - step.start
        one = int(length[0])
        if (length != one).any() or (step.start % one).any() or step.shift % one or chunks % one:
            raise ScheduleError(
                f"{where}: a repeated step needs ranges of one length that divides their starts, the shift "
                f"({step.shift}) and the number of chunks ({chunks}), so that none wraps around; write it out instead"
            )
