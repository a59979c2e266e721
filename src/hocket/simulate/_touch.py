"""Who touched which chunk at which endpoint last: from that, step by step, what waits for what."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["Touched"]

Indices = NDArray[np.int64]

_LOW = 2**31 - 1


class Touched:
    """The task that touched every (endpoint, chunk) last.

    Args:
        endpoints: How many there are.
        chunks: Of each.
    """

    def __init__(self, endpoints: int, chunks: int) -> None:
        self._chunks = chunks
        self._last = np.full(endpoints * chunks, -1, dtype=np.int32)
        self._mark = np.zeros(0, dtype=np.int32)

    def step(
        self, endpoint: Indices, start: Indices, length: Indices, entering: Indices, leaving: Indices, count: int
    ) -> tuple[Indices, Indices, int]:
        """What tasks of one step wait for; then they are the last.

        Args:
            endpoint: Of every touch, where.
            start: The first chunk of its range.
            length: How many chunks.
            entering: The task that waits for who came before.
            leaving: The task that those who come later wait for.
            count: The first number that no task has.

        Returns:
            Pairs (before, after) of tasks, and the first number that no task has now: where several tasks touch a
            chunk in one step, a new one that waits for them all stands in for them.
        """
        base = endpoint * self._chunks + start
        width = int(length[0])
        aligned = (length == width).all() and self._chunks % width == 0 and not (start % width).any()
        if aligned:
            block = base // width
            if len(np.unique(block)) == len(block):  # nobody shares: whole rows at once
                rows = self._last.reshape(-1, width)
                pairs = self._pairs(rows[block].ravel(), np.repeat(entering, width) if width > 1 else entering)
                rows[block] = leaving[:, None]
                return pairs[0], pairs[1], count
        owner = np.repeat(np.arange(len(length)), length)
        ends = np.cumsum(length)
        cells = np.arange(ends[-1]) + (base - ends + length)[owner]
        waiting = self._pairs(self._last[cells], entering[owner])
        standing, count = self._leave(cells, leaving[owner], count)
        before, after = (np.concatenate([one, two]) for one, two in zip(waiting, standing, strict=True))
        return before, after, count

    @staticmethod
    def _pairs(previous: NDArray[np.int32], task: Indices) -> tuple[Indices, Indices]:
        """Distinct (previous, task), without a task that waits for itself or for nobody."""
        if not len(previous):
            return _NONE, _NONE
        # Neighbouring chunks mostly have the same pair, so most go before the sort.
        fresh = np.empty(len(previous), dtype=bool)
        fresh[0] = True
        np.not_equal(previous[1:], previous[:-1], out=fresh[1:])
        fresh[1:] |= task[1:] != task[:-1]
        row = np.flatnonzero(fresh)
        before, after = previous[row].astype(np.int64), task[row]
        kept = (before >= 0) & (before != after)
        key = np.unique((before[kept] << 31) + after[kept])
        return key >> 31, key & _LOW

    def _leave(self, cells: Indices, task: Indices, count: int) -> tuple[tuple[Indices, Indices], int]:
        if not len(self._mark):
            self._mark = np.zeros(len(self._last), dtype=np.int32)
        self._mark[cells] = task
        torn = self._mark[cells] != task
        self._last[cells] = task
        if not torn.any():
            return (_NONE, _NONE), count
        shared = np.unique(cells[torn])
        self._mark[shared] = -1
        rows = np.flatnonzero(self._mark[cells] == -1)
        key = np.unique((task[rows] << 31) + count + np.searchsorted(shared, cells[rows]))
        self._last[shared] = count + np.arange(len(shared))
        return (key >> 31, key & _LOW), count + len(shared)


_NONE = np.zeros(0, dtype=np.int64)
