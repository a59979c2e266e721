"""Where each rank's time went in each step: parts that add up to the step, from what its record says it was in."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hocket.profile import GARBAGE, OPERATION, STEP, WAIT, RankRun, RunRecord

Array = np.ndarray[Any, Any]
_WARM_UP = 2  # steps that set up kernels, buffers and the optimizer's state
_LATEST = 400  # steps that are looked at

LATE, BUBBLE, COLLECTOR, CHECKPOINT, DATA, OPTIMIZER, COMPUTATION = (
    "waiting for late ranks", "waiting for messages", "garbage collection", "checkpoints", "loading data", "optimizer",
    "computation",
)  # fmt: skip
COMMUNICATION = "communication in "
_PHASES = {"checkpoint": CHECKPOINT, "data": DATA, "optimizer": OPTIMIZER}


@dataclass(frozen=True)
class Parts:
    """The steps that all ranks made, in parts.

    Attributes:
        run: The run.
        first: Number of the first of these steps, from 1.
        names: Names of the parts; communication has one for each group.
        seconds: By rank, part and step; the parts of a rank's step add up to its length.
        lengths_s: By rank and step.
        bounds_s: By rank: the ends of the steps, the beginning of the first before them.
    """

    run: RunRecord
    first: int
    names: tuple[str, ...]
    seconds: Array
    lengths_s: Array
    bounds_s: Array

    @property
    def steps(self) -> int:
        """How many steps."""
        return int(self.lengths_s.shape[1])

    def of(self, name: str) -> Array:
        """Return the seconds of one part by rank and step; zeros if nobody had it."""
        if name not in self.names:
            return np.zeros_like(self.lengths_s)
        return np.asarray(self.seconds[:, self.names.index(name)])

    @property
    def communication(self) -> Array:
        """By rank and step: exposed communication of all groups."""
        chosen = [number for number, name in enumerate(self.names) if name.startswith(COMMUNICATION)]
        return np.asarray(self.seconds[:, chosen].sum(axis=1))

    @property
    def work(self) -> Array:
        """By rank and step: what a rank did by itself, without any waiting."""
        return np.asarray(self.lengths_s - self.of(LATE) - self.of(BUBBLE) - self.communication)

    @property
    def step_s(self) -> float:
        """The length of a step: the mean over ranks and steps."""
        return float(self.lengths_s.mean())

    def waterfall(self) -> list[tuple[str, float]]:
        """Return the seconds of a mean step by part, those that a rank alone has too at first; they add up to it."""
        means = dict(zip(self.names, self.seconds.mean(axis=(0, 2)).tolist(), strict=True))
        own = [COMPUTATION, OPTIMIZER, DATA, CHECKPOINT, COLLECTOR]
        order = [*own, *sorted(means.keys() - set(own))]
        return [(name, means[name]) for name in order if name in means and (means[name] > 0.0 or name == COMPUTATION)]


def parts_of(run: RunRecord) -> Parts | None:
    """Return where the time of a run's steps went; None if there are none that all ranks made."""
    numbers = [one.of(STEP)["seq"] for one in run.ranks]
    if any(len(one.steps) < 2 for one in run.ranks):
        return None
    first = max(int(some[0]) for some in numbers)
    last = min(int(some[-1]) for some in numbers)
    if last - first + 1 > 2 * _WARM_UP:
        first += _WARM_UP
    first = max(first, last - _LATEST + 1)
    if last < first:
        return None
    bounds = np.stack(
        [
            one.steps[len(one.steps) - 1 - (int(some[-1]) - first) - 1 :][: last - first + 2]
            for one, some in zip(run.ranks, numbers, strict=True)
        ]
    )
    came = arrivals(run)
    found = [_of_rank(one, came, edges) for one, edges in zip(run.ranks, bounds, strict=True)]
    names = tuple(dict.fromkeys(name for parts in found for name in parts))
    lengths = np.diff(bounds, axis=1)
    seconds = np.stack([np.stack([parts.get(name, np.zeros(lengths.shape[1])) for name in names]) for parts in found])
    return Parts(run, first, names, seconds, lengths, bounds)


Key = tuple[str, tuple[int, ...], int]


def arrivals(run: RunRecord) -> dict[Key, float]:
    """Return when the last rank had come to each operation, by group, its ranks, and number."""
    came: dict[Key, float] = {}
    for one in run.ranks:
        rows = one.of(OPERATION)
        times = np.maximum(rows["started_s"], rows["published_s"])
        for group, seq, at_s in zip(rows["group"].tolist(), rows["seq"].tolist(), times.tolist(), strict=True):
            key = (*one.groups[group], seq)
            came[key] = max(came.get(key, at_s), at_s)
    return came


def _of_rank(one: RankRun, came: dict[Key, float], edges: Array) -> dict[str, Array]:
    """Return the seconds of each step by part; where two hold at once, the one that stands first has it."""
    waits = one.of(WAIT)
    waits = waits[waits["finished_s"] > edges[0]]
    layers: dict[str, list[Array]] = {LATE: [], BUBBLE: []}
    messages = waits["flags"] == 1
    begin, end = waits["started_s"], waits["finished_s"]
    arrived = np.array(
        [
            came.get((*one.groups[group], seq), 0.0) if not message else 0.0
            for group, seq, message in zip(
                waits["group"].tolist(), waits["seq"].tolist(), messages.tolist(), strict=True
            )
        ]
    )
    split = np.clip(arrived, begin, end) if len(waits) else begin
    layers[BUBBLE].append(np.stack([begin, end], 1)[messages])
    layers[LATE].append(np.stack([begin, split], 1)[~messages])
    for number, (name, _) in enumerate(one.groups):
        chosen = ~messages & (waits["group"] == number)
        if chosen.any():
            layers.setdefault(COMMUNICATION + _called(name), []).append(np.stack([split, end], 1)[chosen])
    garbage = one.of(GARBAGE)
    layers[COLLECTOR] = [np.stack([garbage["started_s"], garbage["finished_s"]], 1)]
    phases = one.phases()
    for name in ("checkpoint", "data", "optimizer", *(phases.keys() - _PHASES.keys())):
        if name in phases:
            layers.setdefault(_PHASES.get(name, name), []).append(phases[name])
    seconds: dict[str, Array] = {}
    so_far, before = np.empty((0, 2)), np.zeros(len(edges) - 1)
    for name, intervals in layers.items():
        so_far = _union(np.concatenate([so_far, *intervals]))
        now = _covered(so_far, edges)
        seconds[name] = now - before
        before = now
    seconds[COMPUTATION] = np.diff(edges) - before
    return seconds


def _called(group: str) -> str:
    return "the whole group" if group in ("default_pg", "0") else f"group {group}"


def _union(intervals: Array) -> Array:
    """Return disjoint intervals, in order, that cover the same."""
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    if not len(intervals):
        return intervals
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(intervals[:, 1])
    starts = np.concatenate([[True], intervals[1:, 0] > reach[:-1]])
    return np.stack([intervals[starts, 0], reach[np.concatenate([starts[1:], [True]])]], 1)


def _covered(intervals: Array, edges: Array) -> Array:
    """Return how much of each stretch between edges disjoint intervals cover."""
    if not len(intervals):
        return np.zeros(len(edges) - 1)
    times = intervals.ravel()
    sums = np.repeat(np.concatenate([[0.0], np.cumsum(intervals[:, 1] - intervals[:, 0])]), 2)[1:-1]
    return np.asarray(np.diff(np.interp(edges, times, sums)))
