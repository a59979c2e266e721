"""The same run made again with less work on a rank, or other operations: work is kept, and waiting is made anew.

A rank works, posts operations and waits for some; an operation ends its own time after the last rank has posted it and
the one before it in its group has ended. With a rank's work made shorter, the others wait less, unless another is as
late: so the gain is that of the whole job, not of the rank. (The method of "Understanding Stragglers in Large Model
Training Using What-if Analysis", OSDI 2025.) Messages between stages count as work.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from hocket.profile import OPERATION, WAIT

from ._parts import Array, Parts

_RANKS = 64  # that are replayed: of more, those that work longest, since others wait for them


@dataclass(frozen=True, slots=True)
class ReplayedOperation:
    """An operation of a group, as it was.

    Attributes:
        group: Name and ranks of the group.
        kind: "all_reduce", ...
        nbytes: Bytes of the full vector.
        own_s: Seconds from when all had come, and the one before it in its group had ended, to its end.
    """

    group: tuple[str, tuple[int, ...]]
    kind: str
    nbytes: int
    own_s: float


@dataclass
class Replayed:
    """What came out; sums over the steps, the mean over ranks.

    Attributes:
        seconds: From the first rank's begin to the last one's end.
        late_s: Waiting for ranks that had not come.
        exposed_s: Waiting for operations afterwards, by name and ranks of the group.
    """

    seconds: float = 0.0
    late_s: float = 0.0
    exposed_s: defaultdict[tuple[str, tuple[int, ...]], float] = field(default_factory=lambda: defaultdict(float))


class Replay:
    """Plays some steps again.

    Args:
        parts: The steps.
    """

    def __init__(self, parts: Parts) -> None:
        ranks = range(len(parts.run.ranks))
        if len(ranks) > _RANKS:
            order = np.argsort(-parts.work.mean(axis=1), kind="stable")
            half = _RANKS // 2
            ranks = [*order[:half], *order[np.linspace(half, len(order) - 1, half).astype(int)]]  # type: ignore[assignment]
        self.ranks = [int(rank) for rank in ranks]
        self._bounds = [parts.bounds_s[rank] for rank in self.ranks]
        came = parts.arrivals
        groups = list(came.groups)
        posted: dict[int, float] = {}
        ended: dict[int, float] = {}
        what: dict[int, tuple[str, int]] = {}
        self._members: defaultdict[int, list[int]] = defaultdict(list)
        self._events: list[list[tuple[float, bool, int, float]]] = []
        for number, rank in enumerate(self.ranks):
            one, (begin_s, *_, end_s) = parts.run.ranks[rank], self._bounds[number]
            events: list[tuple[float, bool, int, float]] = []
            for waits, rows in ((False, one.of(OPERATION)), (True, one.of(WAIT))):
                name = "started_s" if waits else "posted_s"
                rows = rows[(rows[name] >= begin_s) & (rows["finished_s"] <= end_s)]
                rows = rows[rows["flags"] != 1] if waits else rows  # of waits: for messages
                keys = came.keys_of(one, rows)
                columns = keys, rows[name], came.ends_of(keys, rows), rows["text"], rows["nbytes"]
                for key, from_s, until_s, text, nbytes in zip(*(column.tolist() for column in columns), strict=True):
                    events.append((from_s, waits, key, until_s))
                    if not waits:
                        posted[key] = max(posted.get(key, from_s), from_s)
                        ended[key] = max(ended.get(key, until_s), until_s)
                        self._members[key].append(number)
                        what[key] = (one.texts[text][0] if text else "?", nbytes)
            self._events.append(sorted(events))
        self._order = sorted(ended, key=ended.__getitem__)
        self.operations: dict[int, ReplayedOperation] = {}
        before: defaultdict[int, float] = defaultdict(lambda: -np.inf)
        for key in self._order:
            own_s = max(0.0, ended[key] - max(posted[key], before[key >> 32]))
            before[key >> 32] = ended[key]
            self.operations[key] = ReplayedOperation(groups[key >> 32], *what[key], own_s)

    def run(
        self, less: Mapping[int, Array] | None = None, own_s: Callable[[ReplayedOperation], float] | None = None
    ) -> Replayed:
        """Return how long the steps would take.

        Args:
            less: By rank, for each step the factor (0 to 1) by which its work is shortened.
            own_s: Gives the seconds of an operation; as they were if not given.
        """
        less, found = less or {}, Replayed()
        works = [
            _work_clock(bounds, events, less.get(rank))
            for rank, bounds, events in zip(self.ranks, self._bounds, self._events, strict=True)
        ]
        now = [float(bounds[0]) for bounds in self._bounds]
        begin_s, at = min(now), [0] * len(now)
        ends: dict[int, float] = {}
        came: defaultdict[int, float] = defaultdict(lambda: -np.inf)
        last: defaultdict[int, float] = defaultdict(lambda: -np.inf)

        def advance(number: int, until: int) -> None:
            events, work, moment = self._events[number], works[number], now[number]
            while at[number] < len(events):
                _, waits, key, _ = events[at[number]]
                moment += work[at[number]]
                at[number] += 1
                if not waits:
                    passed.add((number, key))
                    came[key] = max(came[key], moment)
                    if key == until:
                        break
                elif key in ends and ends[key] > moment:
                    late_s = min(max(0.0, came[key] - moment), ends[key] - moment)
                    found.late_s += late_s
                    found.exposed_s[self.operations[key].group] += ends[key] - moment - late_s
                    moment = ends[key]
            now[number] = moment

        passed: set[tuple[int, int]] = set()
        for key in self._order:
            for number in self._members[key]:
                if (number, key) not in passed:
                    advance(number, key)
            operation = self.operations[key]
            took_s = operation.own_s if own_s is None else own_s(operation)
            ends[key] = last[key >> 32] = max(came[key], last[key >> 32]) + took_s
        for number in range(len(now)):
            advance(number, -1)
        found.seconds = max(moment + work[-1] for moment, work in zip(now, works, strict=True)) - begin_s
        found.late_s /= len(now)
        for group in found.exposed_s:
            found.exposed_s[group] /= len(now)
        return found


def _work_clock(bounds: Array, events: list[tuple[float, bool, int, float]], less: Array | None) -> list[float]:
    """Return the work before each event, and after the last one, made shorter step by step."""
    if not events:
        both = np.array([[bounds[0], bounds[-1]]])
    else:
        from_s, until_s = np.array([event[0] for event in events]), np.array([event[3] for event in events])
        waits = np.array([event[1] for event in events])
        # No work before the end of any wait that began earlier.
        reach = np.maximum.accumulate(np.concatenate([bounds[:1], np.where(waits, until_s, from_s)]))
        both = np.stack(
            [reach, np.concatenate([np.maximum(from_s, reach[:-1]), np.maximum(bounds[-1:], reach[-1:])])], 1
        )
    if less is None:
        return list((both[:, 1] - both[:, 0]).tolist())
    clock = np.concatenate([[0.0], np.cumsum(np.diff(bounds) * less)])
    return list((np.interp(both[:, 1], bounds, clock) - np.interp(both[:, 0], bounds, clock)).tolist())
