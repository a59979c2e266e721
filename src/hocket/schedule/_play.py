"""Plays a schedule on symbols: which ranks' contributions every piece of every vector holds in the end."""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._cells import Cells, Index, Moves, Uneven
from ._ir import Schedule, Step

EXACT_BYTES: Final = 1 << 28
"""Memory to count contributions one by one, a byte for each rank in each piece; beyond it random numbers are used."""
_EXACT_RANKS: Final = 512  # beyond, counting is slower than many a collective's whole simulation

Values = NDArray[Any]


class Race(NamedTuple):
    """Two writes of one step into one place whose order matters."""

    step: int
    transfer: int
    endpoint: int
    chunk: int


class PlayResult(NamedTuple):
    """Places that do not hold what the contract says, as rows of (endpoint, first chunk), and races."""

    wrong: Index
    races: tuple[Race, ...]


def play(schedule: Schedule) -> PlayResult:
    """Play all steps and compare the end with the contract; MemoryError for too many pieces of vectors."""
    cells = Cells(schedule)
    while True:
        try:
            return _play(schedule, cells)
        except Uneven as uneven:
            cells = Cells(schedule, uneven.cuts)


def _play(schedule: Schedule, cells: Cells) -> PlayResult:
    collective, world = schedule.collective, schedule.world
    block = cells.chunk // (schedule.chunks // collective.blocks)
    is_rank = cells.endpoint < world
    algebra = _algebra(schedule, cells.count)
    values = algebra.begin(cells.endpoint, is_rank & collective.before(cells.endpoint, block))
    state = _State(algebra, values, cells)
    number = 0
    for step in schedule.steps:
        if not state.repeated(step):
            for times in range(step.repeat):
                state.apply(number + times, step.turn(times, schedule.chunks))
        number += step.repeat
    wanted = np.flatnonzero(is_rank & collective.after(cells.endpoint, block))
    wrong = wanted[state.spoilt[wanted] | ~algebra.complete(state.values[wanted])]
    return PlayResult(np.stack([cells.endpoint[wrong], cells.chunk[wrong]], axis=1), tuple(state.races))


class _Counts:
    """How often each rank's contribution is in a cell: 0, 1 or more. Exact."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def begin(self, endpoint: Index, holds: NDArray[np.bool_]) -> Values:
        if self.ranks == 1:
            return holds.astype(np.uint8)
        values = np.zeros((len(endpoint), self.ranks), np.uint8)
        values[holds, endpoint[holds]] = 1
        return values

    def total(self, values: Values, begins: Index) -> Values:
        return np.minimum(np.add.reduceat(values, begins, axis=0, dtype=np.uint32), 2).astype(np.uint8)

    def add(self, values: Values, more: Values) -> Values:
        return np.asarray(np.minimum(values + more, 2))

    def complete(self, values: Values) -> NDArray[np.bool_]:
        return np.asarray((values == 1).reshape(len(values), -1).all(axis=1))


class _Sums:
    """The sum of random numbers of 64 bits, one for each rank. A false sum is right with probability 2**-64."""

    def __init__(self, ranks: int) -> None:
        self.numbers = np.random.default_rng(ranks).integers(1 << 64, size=ranks, dtype=np.uint64)

    def begin(self, endpoint: Index, holds: NDArray[np.bool_]) -> Values:
        values = np.zeros(len(endpoint), np.uint64)
        values[holds] = self.numbers[endpoint[holds]]
        return values

    def total(self, values: Values, begins: Index) -> Values:
        return np.asarray(np.add.reduceat(values, begins))

    def add(self, values: Values, more: Values) -> Values:
        return np.asarray(values + more)

    def complete(self, values: Values) -> NDArray[np.bool_]:
        return np.asarray(values == self.numbers.sum())


class _Sets:
    """Which ranks' contributions are in a cell, a bit each: for a barrier, where to hear twice does no harm."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def begin(self, endpoint: Index, holds: NDArray[np.bool_]) -> Values:
        values = np.zeros((len(endpoint), -(-self.ranks // 8)), np.uint8)
        values[holds, endpoint[holds] // 8] = 1 << (endpoint[holds] % 8)
        return values

    def total(self, values: Values, begins: Index) -> Values:
        return np.bitwise_or.reduceat(values, begins, axis=0)

    def add(self, values: Values, more: Values) -> Values:
        return values | more

    def complete(self, values: Values) -> NDArray[np.bool_]:
        full = np.packbits(np.ones(self.ranks, np.bool_), bitorder="little")
        return np.asarray((values == full).all(axis=1))


def _algebra(schedule: Schedule, cells: int) -> _Counts | _Sums | _Sets:
    ranks = schedule.world
    if not schedule.collective.reduces:
        return _Counts(1)  # a chunk has one owner: it is there once, or not
    if schedule.collective.kind == "barrier":
        return _Sets(ranks)
    return _Counts(ranks) if cells * ranks <= EXACT_BYTES and 1 < ranks <= _EXACT_RANKS else _Sums(ranks)


class _State:
    """What all cells hold, and the rule of a step: all read, then all write."""

    def __init__(self, algebra: _Counts | _Sums | _Sets, values: Values, cells: Cells) -> None:
        self.values = values
        self.spoilt = np.zeros(cells.count, np.bool_)
        self.races: list[Race] = []
        self._algebra = algebra
        self._cells = cells
        self._latest = np.zeros(cells.count, np.int32)  # of each cell, the last move that wrote it; scratch

    def repeated(self, step: Step) -> bool:
        """Do all turns of a repeated step, if no two of its writes can meet; return whether it was done.

        A shift moves all chunks alike, so what is apart in the first turn is apart in all. A ring of thousands of ranks
        is thousands of turns, and asking each of them anew takes most of the time.
        """
        if step.repeat == 1 or not len(step) or not self._cells.dense or self.races:
            return False
        moves, chunks = self._cells.moves(step), self._cells.chunks
        if step.reduce.any() != step.reduce.all() or not np.diff(np.sort(moves.destination)).all():
            return False
        chunk = moves.source % chunks
        source, destination = moves.source - chunk, moves.destination - chunk
        for times in range(step.repeat):
            at = (chunk + times * step.shift) % chunks
            read, cell = self.values[source + at], destination + at
            self.values[cell] = self._algebra.add(self.values[cell], read) if step.reduce[0] else read
        return True

    def apply(self, number: int, step: Step) -> None:
        if not len(step):
            return
        moves = self._cells.moves(step)
        self._cells.check_even(step, moves, self.values, self.spoilt)
        read, spoilt = self.values[moves.source], self.spoilt[moves.source]
        adds = step.reduce[moves.row]
        lost: list[Index] = []
        copies = np.flatnonzero(~adds)
        both = np.empty(0, np.int64)
        if 0 < len(copies) < len(adds):
            both = np.intersect1d(moves.destination[copies], moves.destination[adds])
        if len(copies):
            lost.append(self._copy(moves, copies, read, spoilt))
        copied = self.values[both]
        if len(copies) < len(adds):
            lost.append(self._add(moves, np.flatnonzero(adds), read, spoilt))
        if len(both):  # where an addition changes what is copied, it matters which comes last
            both = both[(self.values[both] != copied).reshape(len(both), -1).any(axis=1)]
            lost.append(np.flatnonzero(np.isin(moves.destination, both)))
        for move in np.concatenate(lost):
            cell = moves.destination[move]
            self.spoilt[cell] = True
            row = int(moves.row[move])
            self.races.append(Race(number, row, int(self._cells.endpoint[cell]), int(self._cells.chunk[cell])))

    def _copy(self, moves: Moves, copies: Index, read: Values, spoilt: NDArray[np.bool_]) -> Index:
        """Put what was read in place; return the moves that disagree with another into the same cell."""
        cell = moves.destination[copies]
        self._latest[cell] = np.arange(len(copies))
        last = copies[self._latest[cell]]
        differs = (read[copies] != read[last]).reshape(len(copies), -1).any(axis=1) | (spoilt[copies] != spoilt[last])
        self.values[cell] = read[copies]
        self.spoilt[cell] = spoilt[copies]
        return np.asarray(copies[differs])

    def _add(self, moves: Moves, adds: Index, read: Values, spoilt: NDArray[np.bool_]) -> Index:
        """Add what was read, several additions to one cell together."""
        cell = moves.destination[adds]
        self._latest[cell] = np.arange(len(adds))
        more = read[adds] if len(adds) < len(read) else read
        self.spoilt[cell[spoilt[adds]]] = True
        if (self._latest[cell] != np.arange(len(adds))).any():
            order = np.argsort(cell, kind="stable")
            cell = cell[order]
            begins = np.flatnonzero(np.r_[True, cell[1:] != cell[:-1]])
            cell, more = cell[begins], self._algebra.total(more[order], begins)
        self.values[cell] = self._algebra.add(self.values[cell], more)
        return np.empty(0, np.int64)
