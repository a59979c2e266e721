"""Where each rank's time went in each step: parts that add up to the step, from what its record says it was in."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hocket.profile import GARBAGE, OPERATION, SAMPLE, STEP, WAIT, RankRun, RunRecord

Array = np.ndarray[Any, Any]
WARM_UP = 2  # steps that set up kernels, buffers and the optimizer's state
_LATEST = 400  # steps that are looked at, at most
QUICK = 0.2  # of the steps, those that nothing disturbed
_CELLS = 100_000  # of ranks by steps

LATE, BUBBLE, COLLECTOR, CHECKPOINT, DATA, OPTIMIZER, COMPUTATION = (
    "waiting for late ranks", "waiting for messages", "garbage collection", "checkpoints", "loading data", "optimizer",
    "computation",
)  # fmt: skip
COMMUNICATION = "communication in "
IDEAL, CORES, BLOCKED, SLOWER = (
    "one rank alone", "waiting for a core", "blocked (a file, a lock, a pause)", "computing slower than alone",
)  # fmt: skip
_AT_ONCE = ("all_reduce", "barrier", "all_gather", "all_gather_into_tensor")  # no rank's end comes before all have come
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
        arrivals: When the last rank had come to each operation since.
    """

    run: RunRecord
    first: int
    names: tuple[str, ...]
    seconds: Array
    lengths_s: Array
    bounds_s: Array
    arrivals: "Arrivals"

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

    def means(self) -> list[tuple[str, float]]:
        """Return the seconds of a mean step by part, those that a rank alone has too at first; they add up to it."""
        means = dict(zip(self.names, self.seconds.mean(axis=(0, 2)).tolist(), strict=True))
        own = [COMPUTATION, OPTIMIZER, DATA, CHECKPOINT, COLLECTOR]
        order = [*own, *sorted(means.keys() - set(own))]
        return [(name, means[name]) for name in order if name in means and (means[name] > 0.0 or name == COMPUTATION)]

    def stages(self) -> Array:
        """Return by rank the number of its stage in the pipeline; zeros without one.

        Where ranks wait much for messages and no plan is known, each is taken for a stage of its own.
        """
        ranks = np.array([one.rank for one in self.run.ranks])
        stride = 1
        for name, degree in reversed(self.run.ranks[0].notes.get("plan", {}).get("axes", [])):
            if name == "pipeline":
                return np.asarray(ranks // stride % degree)
            stride *= degree
        return ranks if self.of(BUBBLE).mean() > 0.1 * self.step_s else np.zeros_like(ranks)

    def undisturbed(self, seconds: Array) -> Array:
        """Return by rank what a step takes that nothing disturbs, of seconds by rank and step.

        That is as long as in the quickest fifth of the steps; where there are no stages of a pipeline all ranks do the
        same, and the middle one counts for all.
        """
        quick = np.quantile(seconds, QUICK, axis=1)
        return quick if self.of(BUBBLE).any() else np.full_like(quick, np.median(quick))

    def share(self, seconds: Array) -> float:
        """Return what some seconds of each rank and step are of the length of all steps, 0 to 1."""
        return float(seconds.sum() / self.lengths_s.sum())

    def ready_shares(self, since: int = 0) -> Array:
        """Return by rank the share of the time, from a step on, in which its main thread was ready and had no core."""
        return np.asarray(self._of_thread("arrived_s", self.bounds_s[:, [since, -1]])[:, 0] / self._since_s(since))

    def ran_shares(self, since: int = 0) -> Array:
        """Return by rank the share of the time, from a step on, in which its main thread had a core."""
        return np.asarray(self._of_thread("published_s", self.bounds_s[:, [since, -1]])[:, 0] / self._since_s(since))

    def blocked_shares(self, since: int = 0) -> Array:
        """Return by rank the share of the time, from a step on, in which it was at work, and neither ran nor was ready.

        At least that: what a rank that waits for others uses of a core counts as its work.
        """
        worked = self.work[:, since:].sum(axis=1) / self._since_s(since)
        return np.asarray(np.maximum(0.0, worked - self.ready_shares(since) - self.ran_shares(since)))

    def _since_s(self, since: int) -> Array:
        return np.asarray(np.maximum(self.bounds_s[:, -1] - self.bounds_s[:, since], 1e-9))

    def _of_thread(self, column: str, bounds_s: Array) -> Array:
        """Return by rank, between each two bounds, the seconds of the main thread that samples count; 0 if unknown.

        Samples come four times a second: what they tell of shorter stretches is the mean of those around them.
        """
        found = np.zeros((len(bounds_s), bounds_s.shape[1] - 1))
        for number, (one, bounds) in enumerate(zip(self.run.ranks, bounds_s, strict=True)):
            rows = one.of(SAMPLE)
            if len(rows) < 2:
                continue
            at, counted = rows["posted_s"], rows[column]
            # Before the first sample and after the last one it went on as between these.
            rate = (counted[-1] - counted[0]) / max(at[-1] - at[0], 1e-9)
            inside = np.clip(bounds, at[0], at[-1])
            found[number] = np.diff(np.interp(inside, at, counted) + rate * (bounds - inside))
        return found

    def waterfall(self) -> list[tuple[str, float]]:
        """Return what makes a step longer than that of one rank alone, from the ideal on; the rows add up to the step.

        The ideal is what a rank alone takes to compute and to update, as the program measured it (the note
        "alone_step_s") or else in the quickest steps. What it takes longer is as much the lack of cores as the main
        thread was ready without one in these steps; where it had none and was not ready it was blocked. The rest are
        caches, memory and clock rates that ranks share, and its own unrest.
        """
        own = self.of(COMPUTATION) + self.of(OPTIMIZER)
        data_s, own_s = float(self.of(DATA).mean()), float(own.mean())
        alone_s = self.run.ranks[0].notes.get("alone_step_s")
        ideal_s = max(0.0, alone_s - data_s) if alone_s else min(own_s, float(self.undisturbed(own).mean()))
        more_s = own_s - ideal_s
        # Step by step: a pause in one is not what others lack.
        longer = np.maximum(0.0, own - ideal_s)
        ready, ran = (self._of_thread(name, self.bounds_s) for name in ("arrived_s", "published_s"))
        lacking = np.minimum(longer, ready)
        blocked = np.minimum(longer - lacking, np.maximum(0.0, self.work - ready - ran)) if ran.any() else ran
        cores_s = min(max(0.0, more_s), float(lacking.mean()))
        blocked_s = min(max(0.0, more_s - cores_s), float(blocked.mean()))
        rest = [(name, seconds) for name, seconds in self.means() if name not in (COMPUTATION, OPTIMIZER)]
        rows = [(IDEAL, ideal_s), (CORES, cores_s), (BLOCKED, blocked_s), (SLOWER, more_s - cores_s - blocked_s), *rest]
        return [row for row in rows if row[0] == IDEAL or row[1]]


def parts_of(run: RunRecord) -> Parts | None:
    """Return where the time of a run's steps went; None if there are none that all ranks made."""
    numbers = [one.of(STEP)["seq"] for one in run.ranks]
    if any(len(one.steps) < 2 for one in run.ranks):
        return None
    first = max(int(some[0]) for some in numbers)
    last = min(int(some[-1]) for some in numbers)
    if last - first + 1 > 2 * WARM_UP:
        first += WARM_UP
    first = max(first, last - max(10, min(_LATEST, _CELLS // len(run.ranks))) + 1)
    # A step begins where the one before it ended, and of the first no record tells.
    first = max(first, *(int(some[-1]) - len(one.steps) + 2 for one, some in zip(run.ranks, numbers, strict=True)))
    for one, some in zip(run.ranks, numbers, strict=True):
        # Of steps before the first operation that the record kept all would count as computation.
        if one.lost and len(one.operations):
            known = int(np.searchsorted(one.steps, one.operations["finished_s"][0]))
            first = max(first, int(some[-1]) - len(one.steps) + 2 + known)
    if last < first:
        return None
    bounds = np.stack(
        [
            one.steps[len(one.steps) - 1 - (int(some[-1]) - first) - 1 :][: last - first + 2]
            for one, some in zip(run.ranks, numbers, strict=True)
        ]
    )
    came = Arrivals.of(run, bounds[:, 0])
    found = [_of_rank(one, came, edges, run) for one, edges in zip(run.ranks, bounds, strict=True)]
    names = tuple(dict.fromkeys(name for parts in found for name in parts))
    lengths = np.diff(bounds, axis=1)
    seconds = np.stack([np.stack([parts.get(name, np.zeros(lengths.shape[1])) for name in names]) for parts in found])
    return Parts(run, first, names, seconds, lengths, bounds, came)


@dataclass(frozen=True)
class Arrivals:
    """When the last rank had come to each operation, and when it was over.

    Attributes:
        groups: The groups of all ranks, by name and ranks; their numbers stand in the upper half of a key.
        keys: Of the operations, ascending: the group's number, and in the lower 32 bits the operation's own.
        came_s: Of each.
        over_s: Of each that ends for all at once, as an all-reduce on one host does: when half of the ranks knew
            it. What another waits longer is its own doing: it has no core. Infinity for all others.
    """

    groups: dict[tuple[str, tuple[int, ...]], int]
    keys: Array
    came_s: Array
    over_s: Array

    @classmethod
    def of(cls, run: RunRecord, since_s: Array) -> "Arrivals":
        """Look at the operations that ended after some moment of each rank."""
        groups: dict[tuple[str, tuple[int, ...]], int] = {}
        for one in run.ranks:
            for group in one.groups:
                groups.setdefault(group, len(groups))
        found = cls(groups, np.empty(0, np.int64), np.empty(0), np.empty(0))
        hosts = {one.rank: one.host for one in run.ranks}
        near = np.array([len({hosts.get(rank) for rank in ranks or hosts}) == 1 for _, ranks in groups] or [False])
        keys, came, over = [found.keys], [found.came_s], [found.over_s]
        for one, from_s in zip(run.ranks, since_s.tolist(), strict=True):
            rows = one.of(OPERATION)
            rows = rows[rows["finished_s"] > from_s]
            keys.append(found.keys_of(one, rows))
            came.append(np.maximum(rows["started_s"], rows["published_s"]))
            at_once = [
                n for n, text in enumerate(one.texts) if isinstance(text, list) and text[:1] and text[0] in _AT_ONCE
            ]
            alike = np.isin(rows["text"], at_once) & near[keys[-1] >> 32]
            over.append(np.where(alike, rows["finished_s"], np.inf))
        every, at, counts = np.unique(np.concatenate(keys), return_inverse=True, return_counts=True)
        came_s, ends_s = np.full(len(every), -np.inf), np.concatenate(over)
        np.maximum.at(came_s, at, np.concatenate(came))
        middle = np.cumsum(counts) - counts + (counts - 1) // 2
        return cls(groups, every, came_s, ends_s[np.lexsort((ends_s, at))[middle]])

    def keys_of(self, one: RankRun, rows: Array) -> Array:
        """Return the keys of a rank's operations or waits."""
        numbers = np.array([self.groups[group] for group in one.groups] or [0], np.int64)  # none: all are messages
        return np.asarray(numbers[rows["group"]] << 32 | rows["seq"]) if len(rows) else np.empty(0, np.int64)

    def of_keys(self, keys: Array) -> Array:
        """Return when the last rank had come; minus infinity where it is not known."""
        return self._at(keys, self.came_s, -np.inf)

    def ends_of(self, keys: Array, rows: Array) -> Array:
        """Return when operations or waits of a rank were over; what it took to notice is its own work."""
        ends = np.minimum(rows["finished_s"], self._at(keys, self.over_s, np.inf))
        return np.asarray(np.maximum(rows["started_s"], ends))

    def _at(self, keys: Array, values: Array, unknown: float) -> Array:
        if not len(self.keys):
            return np.full(len(keys), unknown)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, values[at], unknown)


def _of_rank(one: RankRun, came: Arrivals, edges: Array, run: RunRecord) -> dict[str, Array]:
    """Return the seconds of each step by part; where two hold at once, the one that stands first has it."""
    waits = one.of(WAIT)
    waits = waits[waits["finished_s"] > edges[0]]
    layers: dict[str, list[Array]] = {LATE: [], BUBBLE: []}
    messages = waits["flags"] == 1
    keys, begin = came.keys_of(one, waits), waits["started_s"]
    end = np.where(messages, waits["finished_s"], came.ends_of(keys, waits))
    split = np.clip(came.of_keys(keys), begin, end)
    layers[BUBBLE].append(np.stack([begin, end], 1)[messages])
    layers[LATE].append(np.stack([begin, split], 1)[~messages])
    for number, group in enumerate(one.groups):
        chosen = ~messages & (waits["group"] == number)
        if chosen.any():
            layers.setdefault(COMMUNICATION + called(group, run), []).append(np.stack([split, end], 1)[chosen])
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


def axis_of(ranks: tuple[int, ...], run: RunRecord) -> str:
    """Return the axis of the run's plan along which the ranks of a group stand; "" if none, or if no plan is known."""
    stride = 1
    for name, degree in reversed(run.ranks[0].notes.get("plan", {}).get("axes", [])):
        if len(ranks) == degree > 1 and ranks[1] - ranks[0] == stride:
            return str(name)
        stride *= degree
    return ""


def called(group: tuple[str, tuple[int, ...]], run: RunRecord) -> str:
    """Return what a group is called: by its axis, if the run's plan is known; groups of one axis alike."""
    name, ranks = group
    if name in ("default_pg", "0"):
        return "the whole group"
    return f"the {axis} groups" if (axis := axis_of(ranks, run)) else f"group {name}"


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
