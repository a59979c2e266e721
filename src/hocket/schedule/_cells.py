"""Where the verifier keeps its state: one value for each piece of each endpoint's buffer.

Schedules whose transfers move few chunks get one cell a chunk. A halving-doubling of 65,536 ranks has as many chunks,
and four thousand million cells would be needed; but a rank handles few ranges as a whole, so its buffer is cut only
where one of its own transfers begins or ends. That is exact as long as what is written into a cell is the same all over
it; the first time that it is not, `Uneven` says where more cuts are needed.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._ir import Schedule, Step

Index = NDArray[np.int64]

DENSE_CELLS: Final = 1 << 25
MOST_CELLS: Final = 1 << 28
_CUTS_PER_CELL: Final = 16  # more chunks than that for each transfer are dearer one by one than where they are cut


class Moves(NamedTuple):
    """What a step does, cell by cell."""

    source: Index  # the cell that is read
    destination: Index  # the cell that is written
    row: Index  # the transfer's number within the step; sorted
    begin: Index  # where the first cell of each transfer stands in the columns above


class Uneven(Exception):
    """A cell would be written in parts; `cuts` are the keys of all cells that are needed so far."""

    def __init__(self, cuts: Index) -> None:
        super().__init__()
        self.cuts = cuts


class Cells:
    """Numbers the cells of all endpoints, and finds those of a transfer.

    Attributes:
        count: Number of cells.
        endpoint, chunk: Endpoint of each cell, and the chunk where it begins.
    """

    def __init__(self, schedule: Schedule, cuts: Index | None = None) -> None:
        self.chunks = schedule.chunks
        dense = schedule.endpoints * schedule.chunks
        self.dense = dense <= DENSE_CELLS and dense <= _CUTS_PER_CELL * (schedule.transfer_count + schedule.endpoints)
        if self.dense:
            self._keys = np.empty(0, np.int64)
            self.count = schedule.endpoints * schedule.chunks
            self.endpoint, self.chunk = np.divmod(np.arange(self.count), self.chunks)
            return
        if schedule.transfer_count > MOST_CELLS:  # cutting where they end would take all of the memory
            raise MemoryError(f"{schedule.transfer_count:,} transfers are too many to verify at once")
        self._keys = _cuts(schedule) if cuts is None else cuts
        self.count = len(self._keys)
        if self.count > MOST_CELLS:
            raise MemoryError(f"{self.count} pieces of vectors are too many to verify at once")
        self.endpoint, self.chunk = np.divmod(self._keys, self.chunks)

    def moves(self, step: Step) -> Moves:
        """Return the cells that a step's transfers write, and those that hold what is written."""
        if self.dense:
            length = (step.stop - step.start).astype(np.int64)
            row, offset = _spread(length)
            chunk = step.start.astype(np.int64)[row] + offset
            source, destination = step.source.astype(np.int64)[row], step.destination.astype(np.int64)[row]
            begin = np.cumsum(length) - length
            return Moves(source * self.chunks + chunk, destination * self.chunks + chunk, row, begin)
        read_first, read_count = self._of(step.source, step)
        write_first, write_count = self._of(step.destination, step)
        row, offset = _spread(write_count)
        write, read = write_first[row] + offset, read_first[row]
        several = (read_count[row] > 1) & (offset > 0)
        source = step.source.astype(np.int64)[row[several]]
        read[several] = self._holding(source, self.chunk[write[several]])
        return Moves(read, write, row, np.cumsum(write_count) - write_count)

    def check_even(self, step: Step, moves: Moves, values: NDArray[Any], flags: NDArray[np.bool_]) -> None:
        """Raise Uneven if a cell that is written gets different values in its parts."""
        if self.dense:
            return
        first, count = self._of(step.source, step)
        _, write_count = self._of(step.destination, step)
        row, offset = _spread(np.where(count > 1, count, 0))
        read = first[row] + offset
        write_first = moves.destination[moves.begin]
        write = write_first[row]
        several = write_count[row] > 1
        destination = step.destination.astype(np.int64)[row]
        write[several] = self._holding(destination[several], self.chunk[read[several]])
        taken = moves.source[moves.begin[row] + write - write_first[row]]
        differs = values[read] != values[taken]
        odd = differs.any(axis=tuple(range(1, differs.ndim))) | (flags[read] != flags[taken])
        if odd.any():
            raise Uneven(np.union1d(self._keys, destination[odd] * self.chunks + self.chunk[read[odd]]))

    def _of(self, endpoint: NDArray[np.int32], step: Step) -> tuple[Index, Index]:
        """Return the first cell of each transfer at one of its ends, and how many it has there."""
        base = endpoint.astype(np.int64) * self.chunks
        first = np.searchsorted(self._keys, base + step.start)
        return first, np.searchsorted(self._keys, base + step.stop) - first

    def _holding(self, endpoint: Index, chunk: Index) -> Index:
        return np.searchsorted(self._keys, endpoint * self.chunks + chunk, side="right") - 1


def _spread(lengths: Index) -> tuple[Index, Index]:
    """For each of `lengths`, its number that often, and beside it 0, 1, 2, ... below it."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    begin = np.cumsum(lengths) - lengths
    return row, np.arange(len(row)) - begin[row]


def _cuts(schedule: Schedule) -> Index:
    """Return the keys `endpoint * chunks + chunk` where a transfer, or a block of the contract, begins or ends."""
    chunks, world = schedule.chunks, schedule.world
    size = chunks // schedule.collective.blocks
    rank = np.arange(world, dtype=np.int64)
    keys = [np.arange(schedule.endpoints, dtype=np.int64) * chunks]
    if schedule.collective.kind == "all_to_all":
        peer = np.arange(world, dtype=np.int64)[:, None]
        begins = [rank * world * size, ((peer * world + rank) * size)]
        ends = [(rank + 1) * world * size, ((peer * world + rank) * size) + size]
    elif schedule.collective.blocks > 1:
        begins, ends = [rank * size], [(rank + 1) * size]
    else:
        begins, ends = [], []
    for begin in begins:
        keys.append((rank * chunks + begin).ravel())
    for end in ends:
        keys.append((rank * chunks + end)[end < chunks].ravel())
    for step in schedule.steps:
        for times in range(step.repeat):
            turn = step.turn(times, chunks)
            for side in (turn.source, turn.destination):
                base = side.astype(np.int64) * chunks
                keys.append(base + turn.start)
                keys.append((base + turn.stop)[turn.stop < chunks])
    found = np.sort(np.concatenate(keys))
    return found[np.diff(found, prepend=-1) > 0]  # np.unique hashes, which takes 100 times longer for such numbers
