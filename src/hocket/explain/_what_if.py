"""The same run with less work on one rank: each rank's work and each operation's time are kept, waiting is made anew.

A rank works, posts operations and waits for some; an operation ends its own time after the last rank has posted it and
the one before it in its group has ended. With a rank's work made shorter, the others wait less, unless another is as
late: so the gain is that of the whole job, not of the rank. (The method of "Understanding Stragglers in Large Model
Training Using What-if Analysis", OSDI 2025.)
"""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from hocket.profile import OPERATION, WAIT

from ._parts import Array, Key, Parts

_POST, _WAIT_FOR = 0, 1


def replay_s(parts: Parts, less: Mapping[int, Array] | None = None, *, faster: float = 1.0) -> float:
    """Return how long the steps would take.

    Args:
        parts: The steps.
        less: By rank, for each step the factor (0 to 1) by which its work is shortened.
        faster: How many times as fast operations are, once all ranks have come.

    Returns:
        Seconds of all steps together, from the first rank's begin to the last one's end.
    """
    less = less or {}
    lists, posted, ended, members = _events(parts)
    ends: dict[Key, float] = {}
    last: defaultdict[tuple[str, tuple[int, ...]], float] = defaultdict(lambda: -np.inf)
    before: defaultdict[tuple[str, tuple[int, ...]], float] = defaultdict(lambda: -np.inf)
    now = [float(bounds[0]) for bounds in parts.bounds_s]
    at = [0] * len(now)
    works = [_work_clock(parts.bounds_s[rank], events, less.get(rank)) for rank, events in enumerate(lists)]
    begin_s = min(now)

    def advance(rank: int, until: Key | None) -> float:
        events, work = lists[rank], works[rank]
        while at[rank] < len(events):
            kind, key, _, _ = events[at[rank]]
            now[rank] += work[at[rank]]
            at[rank] += 1
            if kind == _WAIT_FOR:
                now[rank] = max(now[rank], ends.get(key, now[rank]))
            elif key == until:
                break
        return now[rank]

    for key in sorted(ended, key=ended.__getitem__):
        group = key[:2]
        arrived_s = max(posted[key].values())
        own_s = max(0.0, ended[key] - max(arrived_s, before[group])) / faster
        before[group] = ended[key]
        come_s = max(advance(rank, key) for rank in members[key])
        ends[key] = last[group] = max(come_s, last[group]) + own_s
    return max(advance(rank, None) + works[rank][-1] for rank in range(len(now))) - begin_s


_Event = tuple[int, Key, float, float]


def _events(
    parts: Parts,
) -> tuple[list[list[_Event]], dict[Key, dict[int, float]], dict[Key, float], dict[Key, list[int]]]:
    """Return each rank's posts and waits in the steps, and when operations were posted by whom and had ended."""
    lists: list[list[_Event]] = []
    posted: defaultdict[Key, dict[int, float]] = defaultdict(dict)
    ended: dict[Key, float] = {}
    members: defaultdict[Key, list[int]] = defaultdict(list)
    for rank, one in enumerate(parts.run.ranks):
        begin_s, end_s = parts.bounds_s[rank][0], parts.bounds_s[rank][-1]
        events: list[_Event] = []
        for kind, rows in ((_POST, one.of(OPERATION)), (_WAIT_FOR, one.of(WAIT))):
            name = "posted_s" if kind == _POST else "started_s"
            rows = rows[
                (rows[name] >= begin_s) & (rows["finished_s"] <= end_s) & ((rows["flags"] != 1) | (kind == _POST))
            ]
            for group, seq, from_s, until_s in zip(
                rows["group"].tolist(),
                rows["seq"].tolist(),
                rows[name].tolist(),
                rows["finished_s"].tolist(),
                strict=True,
            ):
                key = (*one.groups[group], seq)
                events.append((kind, key, from_s, until_s))
                if kind == _POST:
                    posted[key][rank] = from_s
                    ended[key] = max(ended.get(key, until_s), until_s)
                    members[key].append(rank)
        events.sort(key=lambda event: (event[2], event[0]))
        lists.append(events)
    return lists, dict(posted), ended, dict(members)


def _work_clock(bounds: Array, events: list[_Event], less: Array | None) -> list[float]:
    """Return the work before each event, and after the last one, made shorter step by step."""
    edges = [float(bounds[0])]
    pairs = []
    for kind, _, from_s, until_s in events:
        pairs.append((edges[-1], max(from_s, edges[-1])))
        edges.append(max(until_s, edges[-1]) if kind == _WAIT_FOR else max(from_s, edges[-1]))
    pairs.append((edges[-1], max(float(bounds[-1]), edges[-1])))
    both = np.array(pairs)
    if less is None:
        return list((both[:, 1] - both[:, 0]).tolist())
    clock = np.concatenate([[0.0], np.cumsum(np.diff(bounds) * less)])
    return list((np.interp(both[:, 1], bounds, clock) - np.interp(both[:, 0], bounds, clock)).tolist())
