"""The loop of `_loop.py` compiled by numba, for runs of many events; the same rules, link by link.

It is used where numba is installed (`pip install hocket[fast]`); results agree with the plain loop's but for rounding.
Every flow that moves is in a list at each of its links, so that only those that share links with what came or went are
looked at.
"""

import heapq
from typing import Any

import numpy as np
from numba import njit  # type: ignore[import-untyped, unused-ignore]

_SAME = 1 + 1e-12
_TOGETHER = 1e-12


@njit(cache=True)  # type: ignore[untyped-decorator, misc, unused-ignore]
def _fill(
    flows: Any,
    count: int,
    touched: Any,
    links: int,
    offsets: Any,
    link: Any,
    share: Any,
    weight: Any,
    limit: Any,
    capacity: Any,
    left: Any,
    total: Any,
    level: Any,
    open_link: Any,
    least: Any,
    rates: Any,
) -> None:
    """Max-min fair rates of some flows, into `rates`; see `max_min`. The other arrays are memory to work in."""
    for index in range(links):
        left[touched[index]] = capacity[touched[index]]
    live = count
    order = flows[:count].copy()
    while live:
        for index in range(links):
            total[touched[index]] = 0.0
            open_link[touched[index]] = False
        for row in range(live):
            flow = order[row]
            for entry in range(offsets[flow], offsets[flow + 1]):
                total[link[entry]] += share[entry] * weight[flow]
        for index in range(links):
            one = touched[index]
            level[one] = left[one] / total[one] if total[one] > 0 else np.inf
        for row in range(live):
            flow = order[row]
            low = limit[flow] / weight[flow]
            for entry in range(offsets[flow], offsets[flow + 1]):
                low = min(low, level[link[entry]])
            least[row] = low
            for entry in range(offsets[flow], offsets[flow + 1]):
                if low * _SAME < level[link[entry]]:
                    open_link[link[entry]] = True
        kept = 0
        for row in range(live):
            flow = order[row]
            done = limit[flow] <= least[row] * weight[flow] * _SAME
            for entry in range(offsets[flow], offsets[flow + 1]):
                if not open_link[link[entry]]:
                    done = True
            if done:
                rates[flow] = min(least[row] * weight[flow], limit[flow])
                for entry in range(offsets[flow], offsets[flow + 1]):
                    left[link[entry]] = max(left[link[entry]] - share[entry] * rates[flow], 0.0)
            else:
                order[kept] = flow
                kept += 1
        live = kept
    # What rounding has given beyond a link is taken back; a sum of k rates rounds k times.
    for index in range(links):
        total[touched[index]] = 0.0
        level[touched[index]] = 0.0
    for row in range(count):
        flow = flows[row]
        for entry in range(offsets[flow], offsets[flow + 1]):
            total[link[entry]] += share[entry] * rates[flow]
            level[link[entry]] += 1.0
    for row in range(count):
        flow = flows[row]
        factor = 1.0
        for entry in range(offsets[flow], offsets[flow + 1]):
            one = link[entry]
            if total[one] > capacity[one]:
                factor = min(factor, capacity[one] / total[one] * (1 - level[one] * 2.0**-52))
        least[row] = factor
    for row in range(count):
        rates[flows[row]] *= least[row]


@njit(cache=True)  # type: ignore[untyped-decorator, misc, unused-ignore]
def run_compiled(
    delay: Any,
    nbytes: Any,
    offsets: Any,
    link: Any,
    share: Any,
    first: Any,
    successor: Any,
    waits: Any,
    earliest: Any,
    weight: Any,
    limit: Any,
    capacity: Any,
    congestion: float,
    channel: Any,
    channels: int,
    start: Any,
    moving: Any,
    end: Any,
) -> None:
    """Let all tasks happen; see `run`. `start`, `moving` and `end` are written; `waits` is used up."""
    count, width = len(delay), len(capacity)
    heap = [(0.0, 0) for _ in range(0)]  # of when a delay is over, and whose; the comprehension tells numba the types
    rate, done_at = np.zeros(count), np.full(count, np.inf)
    active, moves = np.empty(count, np.int64), 0
    # Flows at every link, as lists through the entries of the usage.
    head, after, before = (
        np.full(width, -1, np.int64),
        np.full(len(link), -1, np.int64),
        np.full(len(link), -1, np.int64),
    )
    owner = np.empty(len(link), np.int64)
    for task in range(count):
        for entry in range(offsets[task], offsets[task + 1]):
            owner[entry] = task
    on_link = np.zeros(width, np.int64)
    left, total, level = np.zeros(width), np.zeros(width), np.zeros(width)
    real, open_link = capacity.copy(), np.zeros(width, np.bool_)
    least = np.empty(count)
    seen_link, seen_flow = np.zeros(width, np.int64), np.zeros(count, np.int64)
    stack, group = np.empty(width, np.int64), np.empty(count, np.int64)
    finished, begun, ready = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    # The flow that a channel carries now, and those that are ready and wait for it, in lists.
    occupied = np.zeros(channels, np.bool_)
    queue_head, queue_tail = np.full(channels, -1, np.int64), np.full(channels, -1, np.int64)
    queued = np.full(count, -1, np.int64)
    stamp, ripe = 0, 0
    for task in range(count):
        if waits[task] == 0:
            ready[ripe] = task
            ripe += 1
    now = 0.0
    while True:
        for index in range(ripe):
            task = ready[index]
            start[task] = max(now, earliest[task])
            heapq.heappush(heap, (start[task] + delay[task], task))
        ripe = 0
        if len(heap) == 0 and moves == 0:
            return
        now = heap[0][0] if len(heap) else np.inf
        for index in range(moves):
            now = min(now, done_at[active[index]])
        horizon = now + now * _TOGETHER
        stamp += 1
        over, fresh, marked = 0, 0, 0
        index = 0
        while index < moves:
            task = active[index]
            if done_at[task] > horizon:
                index += 1
                continue
            finished[over] = task
            over += 1
            moves -= 1
            active[index] = active[moves]
            line = channel[task]
            if line >= 0:
                occupied[line] = queue_head[line] >= 0
                if occupied[line]:
                    begun[fresh] = queue_head[line]
                    queue_head[line] = queued[begun[fresh]]
                    fresh += 1
            for entry in range(offsets[task], offsets[task + 1]):
                one = link[entry]
                if before[entry] >= 0:
                    after[before[entry]] = after[entry]
                else:
                    head[one] = after[entry]
                if after[entry] >= 0:
                    before[after[entry]] = before[entry]
                on_link[one] -= 1
                if seen_link[one] != stamp:
                    seen_link[one] = stamp
                    stack[marked] = one
                    marked += 1
        while len(heap) and heap[0][0] <= horizon:
            task = heapq.heappop(heap)[1]
            if nbytes[task] <= 0 or offsets[task] == offsets[task + 1]:
                moving[task] = now
                finished[over] = task
                over += 1
                continue
            line = channel[task]
            if line >= 0 and occupied[line]:
                if queue_head[line] < 0:
                    queue_head[line] = task
                else:
                    queued[queue_tail[line]] = task
                queue_tail[line] = task
                continue
            if line >= 0:
                occupied[line] = True
            begun[fresh] = task
            fresh += 1
        for index in range(fresh):
            task = begun[index]
            moving[task] = now
            active[moves] = task
            moves += 1
            for entry in range(offsets[task], offsets[task + 1]):
                one = link[entry]
                before[entry], after[entry] = -1, head[one]
                if head[one] >= 0:
                    before[head[one]] = entry
                head[one] = entry
                on_link[one] += 1
                if seen_link[one] != stamp:
                    seen_link[one] = stamp
                    stack[marked] = one
                    marked += 1
        # Everything that shares a link with these, directly or over others, gets new rates.
        members, at = 0, 0
        while at < marked:
            entry = head[stack[at]]
            at += 1
            while entry >= 0:
                task = owner[entry]
                if seen_flow[task] != stamp:
                    seen_flow[task] = stamp
                    group[members] = task
                    members += 1
                    for other in range(offsets[task], offsets[task + 1]):
                        one = link[other]
                        if seen_link[one] != stamp:
                            seen_link[one] = stamp
                            stack[marked] = one
                            marked += 1
                entry = after[entry]
        if members:
            for index in range(members):
                task = group[index]
                # The rate of before, kept apart: `left` of a flow follows from when it would have ended.
                least[index] = rate[task]
            if congestion > 0:
                for index in range(marked):
                    one = stack[index]
                    real[one] = capacity[one] / (1 + congestion * max(on_link[one] - 1, 0))
            old = least[:members].copy()
            _fill(
                group, members, stack, marked, offsets, link, share, weight, limit, real, left, total, level,
                open_link, least, rate,
            )  # fmt: skip
            for index in range(members):
                task = group[index]
                if old[index] == 0.0:
                    done_at[task] = now + nbytes[task] / rate[task]
                elif rate[task] != old[index]:
                    done_at[task] = now + (done_at[task] - now) * old[index] / rate[task]
        for index in range(over):
            task = finished[index]
            end[task] = now
            done_at[task] = np.inf
            for position in range(first[task], first[task + 1]):
                waiting = successor[position]
                waits[waiting] -= 1
                if waits[waiting] == 0:
                    ready[ripe] = waiting
                    ripe += 1
