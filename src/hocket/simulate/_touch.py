"""Who touched which chunk at which endpoint last: from that, step by step, what waits for what."""

import numpy as np
from numpy.typing import NDArray

from hocket.schedule import Schedule

from ._fair import Indices, ragged
from ._tasks import SimulationError

_LOW = 2**31 - 1
_FEW = 1 << 24  # cells that are numbered by their width in any case
_FINE = 2  # more cells than that for each transfer: endpoints are cut where transfers end
_CELLS = 1 << 29  # that fit in memory: 2 GiB of numbers
_NONE = np.zeros(0, dtype=np.int64)


class Touched:
    """The task that touched every (endpoint, chunk) last.

    Chunks that an endpoint only ever moves together are one cell there: a rank that sends its vector whole has one.
    What divides all ranges of an endpoint is the width of its cells. Where that makes more cells than transfers have
    ends, endpoints are cut where their own transfers begin and end: halving-doubling of 65,536 ranks has about a
    million cells then, and not 4,300 million.

    Args:
        schedule: Whose endpoints and chunks they are.

    Raises:
        SimulationError: there are more cells than memory holds.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._cuts: Indices | None = None
        self._chunks = schedule.chunks
        grain = np.full(schedule.endpoints, schedule.chunks, dtype=np.int64)
        for step in schedule.steps:
            # What divides all ranges of a step is taken for all of its endpoints: at times too fine, but quick.
            common = np.gcd(np.gcd.reduce(step.start), np.gcd.reduce(step.stop)) if len(step) else 0
            common = np.gcd(common, step.shift if step.repeat > 1 else 0)
            for end in (step.source, step.destination):
                grain[end] = np.gcd(grain[end], common)
        counts = schedule.chunks // grain
        cells = int(counts.sum())
        if cells > _FEW and _FINE * schedule.transfer_count < cells:
            self._cuts = _cuts(schedule)
            cells = len(self._cuts)
        if cells > _CELLS:
            raise SimulationError(
                f"{schedule.name} has {schedule.endpoints} endpoints and {schedule.chunks} chunks: {cells} pieces of "
                f"vectors, more than {_CELLS}; simulate a smaller world, or take the closed form"
            )
        self._mark = np.zeros(0, dtype=np.int32)
        self._last = np.full(cells, -1, dtype=np.int32)
        if self._cuts is not None:
            return
        # Endpoints with many cells first: then the places of equal blocks are multiples of their width, mostly.
        order = np.argsort(-counts, kind="stable")
        self._base = np.empty(schedule.endpoints, dtype=np.int64)
        self._base[order] = np.cumsum(counts[order]) - counts[order]
        self._grain = grain

    def step(
        self, endpoint: Indices, start: Indices, length: Indices, entering: Indices, leaving: Indices, count: int
    ) -> tuple[Indices, Indices, int]:
        """Return what tasks of one step wait for; then they are the last.

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
        if self._cuts is None:
            grain = self._grain[endpoint]
            base, width = self._base[endpoint] + start // grain, length // grain
        else:
            first_key = endpoint.astype(np.int64) * self._chunks + start
            base = np.searchsorted(self._cuts, first_key)
            width = np.searchsorted(self._cuts, first_key + length) - base
        # Touches of the same range are one block, whose cells have one history from here on.
        _, first, block = np.unique(base * (int(width.max()) + 1) + width, return_index=True, return_inverse=True)
        place, size = base[first], width[first]
        if (place[1:] < place[:-1] + size[:-1]).any():  # ranges that overlap in part: cell by cell
            owner = np.repeat(np.arange(len(width)), width)
            cells = ragged(base, width)
            waiting = _pairs(self._last[cells], entering[owner])
            standing, count = self._leave(cells, leaving[owner], count)
            return np.concatenate([waiting[0], standing[0]]), np.concatenate([waiting[1], standing[1]]), count
        previous, who = self._previous(place, size)
        if len(place) == len(base):
            before, after = previous.astype(np.int64), entering[first][who]
            kept = (before >= 0) & (before != after)
            before, after = before[kept], after[kept]
            if len(before) > 4 * len(place):  # a pair that is named twice is counted down twice, so it may stay
                before, after = _distinct(before, after)
            self._write(place, size, leaving[first])
            return before, after, count
        return self._crowded(block, place, size, previous, who, entering, leaving, count)

    def _previous(self, place: Indices, size: Indices) -> tuple[NDArray[np.int32], Indices]:
        """Return the tasks that touched each block last, and whose block each is; neighbours that are equal once."""
        width = int(size[0])
        if (size == width).all() and not (place % width).any() and len(self._last) % width == 0:
            rows = self._last.reshape(-1, width)[place // width]
            fresh = np.ones(rows.shape, dtype=bool)
            np.not_equal(rows[:, 1:], rows[:, :-1], out=fresh[:, 1:])
            at = np.flatnonzero(fresh)
            return rows.ravel()[at], at // width
        previous, who = self._last[ragged(place, size)], np.repeat(np.arange(len(place)), size)
        kept = np.ones(len(previous), dtype=bool)
        np.not_equal(previous[1:], previous[:-1], out=kept[1:])
        kept[1:] |= who[1:] != who[:-1]
        return previous[kept], who[kept]

    def _write(self, place: Indices, size: Indices, task: Indices) -> None:
        width = int(size[0])
        if (size == width).all() and not (place % width).any() and len(self._last) % width == 0:
            self._last.reshape(-1, width)[place // width] = task[:, None]
        else:
            self._last[ragged(place, size)] = np.repeat(task, size)

    def _crowded(
        self,
        block: Indices,
        place: Indices,
        size: Indices,
        previous: NDArray[np.int32],
        who: Indices,
        entering: Indices,
        leaving: Indices,
        count: int,
    ) -> tuple[Indices, Indices, int]:
        """Return a step in which several tasks touch one block: one before them waits, and one after them stands in."""
        come_block, come = _distinct(block, entering)
        go_block, go = _distinct(block, leaving)
        past_block, past = _distinct(who, previous.astype(np.int64))
        past_block, past = past_block[past >= 0], past[past >= 0]
        comers = np.bincount(come_block, minlength=len(place))
        pasts = np.bincount(past_block, minlength=len(place))
        gate = np.full(len(place), -1, dtype=np.int64)
        wide = (comers > 1) & (pasts > 1)
        # A stream through switches may come back to a block; it cannot stand on both sides of a gate.
        again = np.isin(come_block * (_LOW + 1) + come, past_block * (_LOW + 1) + past)
        wide[come_block[again]] = False
        gate[wide] = count + np.arange(int(wide.sum()))
        count += int(wide.sum())
        edges = [
            (past[wide[past_block]], gate[past_block[wide[past_block]]]),
            (gate[come_block[wide[come_block]]], come[wide[come_block]]),
            _product(past_block[~wide[past_block]], past[~wide[past_block]], come_block, come, len(place)),
        ]
        goers = np.bincount(go_block, minlength=len(place))
        token = np.empty(len(place), dtype=np.int64)
        token[go_block] = go
        crowd = goers > 1
        token[crowd] = count + np.arange(int(crowd.sum()))
        count += int(crowd.sum())
        edges.append((go[crowd[go_block]], token[go_block[crowd[go_block]]]))
        self._write(place, size, token)
        before, after = (np.concatenate([edge[side] for edge in edges]) for side in (0, 1))
        return before[before != after], after[before != after], count

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


def _cuts(schedule: Schedule) -> Indices:
    """Return endpoint * chunks + chunk of where every endpoint begins, and every transfer begins or ends; sorted."""
    chunks = schedule.chunks
    found = [np.arange(schedule.endpoints, dtype=np.int64) * chunks]
    for step in schedule.each_step():
        for end in (step.source, step.destination):
            base = end.astype(np.int64) * chunks
            found += [base + step.start, (base + step.stop)[step.stop < chunks]]
    keys = np.sort(np.concatenate(found))
    return keys[np.diff(keys, prepend=-1) > 0]  # np.unique hashes, which takes 100 times longer for such numbers


def _pairs(previous: NDArray[np.int32], task: Indices) -> tuple[Indices, Indices]:
    """Distinct (previous, task), without a task that waits for itself or for nobody."""
    before = previous.astype(np.int64)
    kept = (before >= 0) & (before != task)
    return _distinct(before[kept], task[kept])


def _distinct(first: Indices, second: Indices) -> tuple[Indices, Indices]:
    """Pairs without repetition; both below 2^31, and the second possibly -1."""
    key = np.sort((first << 32) + second + 1)
    key = key[np.diff(key, prepend=-1) > 0]
    return key >> 32, (key & (2**32 - 1)) - 1


def _product(
    past_block: Indices, past: Indices, come_block: Indices, come: Indices, blocks: int
) -> tuple[Indices, Indices]:
    """All (past, come) of the same block; both are in order of blocks."""
    start = np.searchsorted(come_block, np.arange(blocks + 1))
    counts = (start[1:] - start[:-1])[past_block]
    position = ragged(start[past_block], counts)
    return np.repeat(past, counts), come[position]
