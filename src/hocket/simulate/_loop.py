"""The loop that lets tasks happen, from one event to the next."""

import functools
import heapq
import importlib.util
from collections import deque
from collections.abc import Callable

import numpy as np

from ._fair import Floats, Indices, max_min, ragged, weighted_count
from ._tasks import LoadTrace, Outcome, SimulationError, Tasks

# Events that lie no further apart than this part of the time are one: they differ by rounding.
_TOGETHER = 1e-12
_MANY = 2000  # tasks from which on the compiled loop is worth its loading, a second or so


def run(tasks: Tasks, capacity_Bps: Floats, *, trace: LoadTrace | None = None) -> Outcome:
    """Let all tasks happen; rates are max-min fair at every moment.

    Time goes from event to event: a task is ready, a delay has passed, a last byte has arrived. Between events rates
    are constant. What happens together is handled together, in the order of the tasks' numbers, so that equal input
    gives equal output to the last bit. Rates are worked out again only for flows that share links with those that came
    or went, directly or over others.

    Args:
        tasks: What to do.
        capacity_Bps: float64 per link.
        trace: Written with the load of every link over time, if given.

    Raises:
        SimulationError: if tasks wait for each other, or a task moves bytes over nothing without a limit.
    """
    loop = _Run(tasks, capacity_Bps, trace)
    compiled = _compiled() if trace is None and tasks.server is None and len(tasks) >= _MANY else None
    return loop.all() if compiled is None else loop.all_compiled(compiled)


@functools.cache
def _compiled() -> Callable[..., None] | None:
    """Return the compiled loop, or None where numba is not installed."""
    if importlib.util.find_spec("numba") is None:
        return None
    from ._compiled import run_compiled

    return run_compiled  # type: ignore[no-any-return, unused-ignore]


class _Run:
    def __init__(self, tasks: Tasks, capacity_Bps: Floats, trace: LoadTrace | None) -> None:
        count = len(tasks)
        self._tasks, self._capacity, self._trace = tasks, capacity_Bps, trace
        order = np.argsort(tasks.before, kind="stable")
        self._successors = tasks.after[order]
        self._first = np.searchsorted(tasks.before[order], np.arange(count + 1))
        self._waits = np.bincount(tasks.after, minlength=count)
        self._start = np.full(count, np.nan)
        self._moving = np.full(count, np.nan)
        self._end = np.full(count, np.nan)
        self._flows = (tasks.nbytes > 0) & (np.diff(tasks.usage.offsets) > 0)
        free = (tasks.nbytes > 0) & ~self._flows
        self._delay = tasks.delay_s
        if free.any():
            if tasks.limit_Bps is None or not np.isfinite(tasks.limit_Bps[free]).all():
                worst = int(np.flatnonzero(free)[0])
                raise SimulationError(f"task {worst} moves bytes over no link; give it links, a limit, or no bytes")
            self._delay = tasks.delay_s + np.where(free, tasks.nbytes / tasks.limit_Bps, 0.0)
        self._weight = np.ones(count) if tasks.weight is None else tasks.weight
        self._limit = tasks.limit_Bps
        channels = 0 if tasks.channel is None or not count else int(tasks.channel.max()) + 1
        self._occupied = np.zeros(channels, dtype=bool)
        self._claim = np.zeros(channels, dtype=np.int64)
        self._queues: dict[int, deque[int]] = {}
        self._heap: list[tuple[float, int, Indices]] = []
        self._pushed = 0
        self._busy: dict[int, float] = {}
        # The flows that move now; parallel arrays.
        self._ids = np.zeros(0, dtype=np.int64)
        self._left = np.zeros(0)
        self._rate = np.zeros(0)
        self._done_at = np.zeros(0)
        self._now = 0.0
        self._on_link = np.zeros(len(capacity_Bps), dtype=np.int64)

    def all(self) -> Outcome:
        ready = np.flatnonzero(self._waits == 0)
        self._begin(ready)
        while self._heap or len(self._ids):
            self._step()
        return self._outcome()

    def all_compiled(self, loop: Callable[..., None]) -> Outcome:
        """Return the same by the compiled loop."""
        tasks, usage, count = self._tasks, self._tasks.usage, len(self._tasks)
        loop(
            self._delay,
            tasks.nbytes,
            usage.offsets,
            usage.links,
            usage.shares,
            self._first,
            self._successors,
            self._waits,
            np.zeros(count) if tasks.earliest_s is None else tasks.earliest_s,
            self._weight,
            np.full(count, np.inf) if self._limit is None else self._limit,
            np.array(self._capacity),
            float(tasks.congestion),
            np.full(count, -1) if tasks.channel is None else tasks.channel,
            len(self._occupied),
            self._start,
            self._moving,
            self._end,
        )
        return self._outcome()

    def _outcome(self) -> Outcome:
        unfinished = np.flatnonzero(np.isnan(self._end))
        if len(unfinished):
            raise SimulationError(
                f"{len(unfinished)} tasks wait for each other in a circle, task {unfinished[0]} among them"
            )
        usage = self._tasks.usage
        moved = np.repeat(self._tasks.nbytes, np.diff(usage.offsets)) * usage.shares
        crossed = weighted_count(usage.links, moved, len(self._capacity))
        return Outcome(self._start, self._moving, self._end, crossed)

    def _step(self) -> None:
        next_delay = self._heap[0][0] if self._heap else np.inf
        next_end = float(self._done_at.min()) if len(self._ids) else np.inf
        now = min(next_delay, next_end)
        horizon = now + now * _TOGETHER
        self._now = now
        arrived = np.flatnonzero(self._done_at <= horizon)
        ended = [self._ids[arrived]]
        starting = []
        while self._heap and self._heap[0][0] <= horizon:
            ids = heapq.heappop(self._heap)[2]
            moves = self._flows[ids]
            starting.append(ids[moves])
            ended.append(ids[~moves])
        begun = np.sort(np.concatenate(starting)) if starting else np.zeros(0, dtype=np.int64)
        if self._tasks.channel is not None:
            begun = self._admit(self._tasks.channel, self._ids[arrived], begun)
        finished = np.sort(np.concatenate(ended))
        self._moving[begun] = now
        self._end[finished] = now
        still = finished[np.isnan(self._moving[finished])]
        self._moving[still] = now
        if len(arrived) or len(begun):
            self._reshare(arrived, begun)
        if len(finished):
            self._release(finished)

    def _admit(self, channel: Indices, arrived: Indices, ready: Indices) -> Indices:
        """Of the flows that are ready those whose channel is free, and those that waited for one that is free now."""
        left = channel[arrived]
        self._occupied[left[left >= 0]] = False
        waited = []
        for line in left[left >= 0].tolist() if self._queues else ():
            queue = self._queues.get(line)
            if queue:
                waited.append(queue.popleft())
                self._occupied[line] = True
                if not queue:
                    del self._queues[line]
        wanted = channel[ready]
        own = wanted >= 0
        self._claim[wanted[own]] = ready[own]
        if not (self._occupied[wanted[own]] | (self._claim[wanted[own]] != ready[own])).any():
            admitted = ready
            self._occupied[wanted[own]] = True
        else:
            kept = []
            for task, line in zip(ready.tolist(), wanted.tolist(), strict=True):
                if line >= 0 and self._occupied[line]:
                    self._queues.setdefault(line, deque()).append(task)
                    continue
                if line >= 0:
                    self._occupied[line] = True
                kept.append(task)
            admitted = np.array(kept, dtype=np.int64)
        return np.sort(np.concatenate([np.array(waited, dtype=np.int64), admitted]))

    def _release(self, finished: Indices) -> None:
        """Count down what waited for these, and begin what waits no longer."""
        counts = self._first[finished + 1] - self._first[finished]
        waiting = self._successors[ragged(self._first[finished], counts)]
        if not len(waiting):
            return
        np.subtract.at(self._waits, waiting, 1)
        ready = np.unique(waiting[self._waits[waiting] == 0])
        self._begin(ready)

    def _begin(self, ready: Indices) -> None:
        if not len(ready):
            return
        tasks = self._tasks
        start = np.full(len(ready), self._now)
        if tasks.earliest_s is not None:
            np.maximum(start, tasks.earliest_s[ready], out=start)
        if tasks.server is not None:
            for row in np.flatnonzero(tasks.server[ready] >= 0).tolist():
                server = int(tasks.server[ready[row]])
                start[row] = max(start[row], self._busy.get(server, 0.0))
                self._busy[server] = start[row] + self._delay[ready[row]]
        self._start[ready] = start
        due = start + self._delay[ready]
        if (due == due[0]).all():
            self._push(float(due[0]), ready)
            return
        order = np.argsort(due, kind="stable")
        cuts = np.flatnonzero(np.diff(due[order])) + 1
        for group in np.split(order, cuts):
            self._push(float(due[group[0]]), ready[group])

    def _push(self, due: float, ids: Indices) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (due, self._pushed, ids))

    def _reshare(self, arrived: Indices, begun: Indices) -> None:
        """Take flows out and in, and work out anew the rates that this changes."""
        usage = self._tasks.usage
        gone = usage.take(self._ids[arrived]).links
        come = usage.take(begun).links
        self._on_link -= np.bincount(gone, minlength=len(self._on_link))
        if len(arrived):
            keep = np.ones(len(self._ids), dtype=bool)
            keep[arrived] = False
            self._ids = self._ids[keep]
            self._left, self._rate, self._done_at = self._left[keep], self._rate[keep], self._done_at[keep]
        touched = np.concatenate([gone, come])
        shared = bool((self._on_link[touched] > 0).any())
        self._on_link += np.bincount(come, minlength=len(self._on_link))
        old = len(self._ids)
        if len(begun):
            self._ids = np.concatenate([self._ids, begun])
            self._left = np.concatenate([self._left, self._tasks.nbytes[begun]])
            self._rate = np.concatenate([self._rate, np.zeros(len(begun))])
            self._done_at = np.concatenate([self._done_at, np.full(len(begun), np.inf)])
        affected = self._affected(touched) if shared else np.arange(old, len(self._ids))
        if len(affected):
            self._rerate(affected)
        if self._trace is not None:
            self._note()

    def _affected(self, touched: Indices) -> Indices:
        """Positions of the flows that share a link with these links, directly or over other flows."""
        own = self._tasks.usage.take(self._ids)
        if len(self._ids) < 2:
            return np.arange(len(self._ids))
        marked = np.zeros(len(self._capacity), dtype=bool)
        marked[touched] = True
        starts = own.offsets[:-1]
        counts = np.diff(own.offsets)
        known = np.zeros(len(self._ids), dtype=bool)
        while True:
            reached = np.logical_or.reduceat(marked[own.links], starts)
            new = reached & ~known
            if not new.any():
                return np.flatnonzero(known)
            known |= reached
            if known.all():
                return np.arange(len(self._ids))
            marked[own.links[np.repeat(new, counts)]] = True

    def _rerate(self, affected: Indices) -> None:
        ids = self._ids[affected]
        limit = None if self._limit is None else self._limit[ids]
        capacity = self._capacity
        if self._tasks.congestion:
            capacity = capacity / (1 + self._tasks.congestion * np.maximum(self._on_link - 1, 0))
        rates = max_min(self._tasks.usage.take(ids), capacity, weight=self._weight[ids], limit_Bps=limit)
        # What is left follows from when it would have ended, so that untouched flows cost nothing between events.
        running = self._rate[affected] > 0
        left = self._left[affected]
        left[running] = (self._done_at[affected[running]] - self._now) * self._rate[affected[running]]
        self._left[affected] = left
        changed = ~running | (rates != self._rate[affected])
        self._rate[affected] = rates
        due = np.where(changed, self._now + left / rates, self._done_at[affected])
        self._done_at[affected] = due

    def _note(self) -> None:
        own = self._tasks.usage.take(self._ids)
        rates = np.repeat(self._rate, np.diff(own.offsets)) * own.shares
        load = weighted_count(own.links, rates, len(self._capacity))
        assert self._trace is not None
        if self._trace.times_s and self._trace.times_s[-1] == self._now:
            self._trace.loads_Bps[-1] = load
        else:
            self._trace.times_s.append(self._now)
            self._trace.loads_Bps.append(load)
