"""What a step of a run should take, part by part, and what it would take with more workers or another network.

What a rank does by itself is predicted to be as long as in the quickest fifth of its steps (of ranks that do the same,
as with the middle one of them); so is an operation, once all have come, among those of its group, kind and size; then
the steps are replayed, which tells who waits for what. So what is measured beyond it is what disturbed the run. What
the plan itself predicted before the run, if it did, stands beside it.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hocket.planner import LEVEL, PLANNED_PARTS, Constants, slowest_of, spread
from hocket.schedule import KINDS, Collective

from ._parts import BUBBLE, COMMUNICATION, COMPUTATION, LATE, QUICK, Parts, axis_of, called
from ._replay import Replay, Replayed, ReplayedOperation
from ._verdict import SHOWN, ms

_MORE = 8  # workers
_STREAMING = 0.95  # of a link, what switches that reduce pass on; as in `hocket predict --what-if sharp`
_PLANNED = dict(zip((COMPUTATION, "communication", "waiting for others"), PLANNED_PARTS.values(), strict=True))
Group = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What a step would take if something were otherwise.

    Attributes:
        what: That, in words.
        step_s: Seconds of a step; nan where nothing can be said.
        interval_s: Between which they are with 80%.
        throughput: Samples a second by those of now; batches grow with the workers.
        note: What it takes to be so, or why nothing can be said.
    """

    what: str
    step_s: float
    interval_s: tuple[float, float]
    throughput: float
    note: str = ""

    @property
    def within(self) -> tuple[float, float]:
        """The same as `throughput` for both ends of the interval, the lower one first."""
        low_s, high_s = self.interval_s
        return self.throughput * self.step_s / high_s, self.throughput * self.step_s / low_s

    def __str__(self) -> str:
        if self.step_s != self.step_s:
            return f"{self.what}: {self.note}"
        within = " to ".join(map(ms, self.interval_s))
        return (
            f"{self.what}: {ms(self.step_s)} ms a step ({within} ms with {LEVEL:.0%}), "
            f"{self.throughput:.2f} times the samples a second{f'; {self.note}' if self.note else ''}"
        )


@dataclass(frozen=True)
class PredictedStep:
    """A step as it should be beside the step as it was.

    Attributes:
        rows: Part, predicted and measured seconds; both add up to the step.
        interval_s: Between which the predicted step is with 80%.
        planned: What the plan said before the run, by coarser parts: part, predicted and measured seconds; the step
            first; none if it said nothing.
        what_ifs: What would be otherwise.
        plan: The plan in short, "" where nobody noted it.
        steps: How many steps were looked at.
    """

    rows: tuple[tuple[str, float, float], ...]
    interval_s: tuple[float, float]
    planned: tuple[tuple[str, float, float], ...]
    what_ifs: tuple[WhatIf, ...]
    plan: str
    steps: int

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return sum(predicted for _, predicted, _ in self.rows)

    @property
    def measured_s(self) -> float:
        """Measured seconds of a step."""
        return sum(measured for _, _, measured in self.rows)

    @property
    def error(self) -> float:
        """Of the step: predicted by measured, less 1."""
        return self.step_s / self.measured_s - 1.0

    def lines(self) -> list[str]:
        """Return it for a terminal."""
        within = " to ".join(map(ms, self.interval_s))
        shown = [row for row in self.rows if max(row[1:]) >= SHOWN * self.measured_s]
        rows = [("a step", self.step_s, self.measured_s), *shown]
        width = max(len(name) for name, _, _ in rows)
        lines = [f"{f'plan: {self.plan}'[:width] if self.plan else '':{width}} {'predicted':>12} {'measured':>12}"]
        if len(self.plan) > width - 6:
            lines = [f"plan: {self.plan}", f"{'':{width}} {'predicted':>12} {'measured':>12}"]
        for number, (name, predicted, measured) in enumerate(rows):
            error = f"{predicted / measured - 1:+8.1%}" if measured > 0.01 * self.measured_s else ""
            tail = f"  ({within} ms with {LEVEL:.0%})" if number == 0 else ""
            lines.append(f"{name:{width}} {predicted * 1e3:9.3f} ms {measured * 1e3:9.3f} ms {error}{tail}".rstrip())
        if self.planned:
            said = ", ".join(f"{part} {ms(a)} ({ms(b)})" for part, a, b in self.planned)
            lines.append(f"the plan predicted before the run, in ms (measured): {said}")
        return [*lines, *(f"with {one}" for one in self.what_ifs)]

    def brief(self) -> list[str]:
        """Return it in a few lines; parts below 2% of the step are left out."""
        least_s = 0.02 * max(self.measured_s, self.step_s)
        told = [f"{name} {ms(b)} ({ms(a)})" for name, a, b in self.rows if max(a, b) >= least_s]
        gains = [
            f"{one.what}: {one.throughput:.2f} times the samples a second "
            f"({' to '.join(f'{rate:.2f}' for rate in one.within)})"
            for one in self.what_ifs
            if one.step_s == one.step_s
        ]
        within = " to ".join(map(ms, self.interval_s))
        lines = [f"a step took {ms(self.measured_s)} ms, {ms(self.step_s)} predicted ({within} with 80%);"]
        lines.append(f"  in ms, predicted in brackets: {', '.join(told)}")
        return lines + ([f"  predicted: {'; '.join(gains)}"] if gains else [])

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        named = ("part", "predicted_s", "measured_s")
        return {
            "plan": self.plan,
            "step_s": self.step_s,
            "interval_s": list(self.interval_s),
            "measured_s": self.measured_s,
            "error": self.error,
            "parts": [dict(zip(named, row, strict=True)) for row in self.rows],
            "planned": [dict(zip(named, row, strict=True)) for row in self.planned],
            "what_ifs": [
                {"what": one.what, "step_s": None, "note": one.note} if one.step_s != one.step_s else
                {"what": one.what, "step_s": one.step_s, "interval_s": list(one.interval_s),
                 "throughput": one.throughput, "note": one.note}
                for one in self.what_ifs
            ],
        }  # fmt: skip


def predicted_of(parts: Parts) -> PredictedStep:
    """Predict a run's steps from its record, and what would be otherwise."""
    replay, steps = Replay(parts), parts.steps
    own = [name for name in parts.names if name != LATE and not name.startswith(COMMUNICATION)]
    quick = {name: parts.undisturbed(parts.of(name)) for name in own}
    now = parts.work + parts.of(BUBBLE)
    work = parts.undisturbed(now)
    quick[COMPUTATION] = np.maximum(0.0, work - sum(quick[name] for name in own if name != COMPUTATION))
    each = {name: float(values.mean()) for name, values in quick.items()}
    less = {rank: np.clip(work[rank] / np.maximum(now[rank], 1e-9), 0.0, 4.0) for rank in replay.ranks}
    found = replay.run(less, _usual(replay))
    each |= _waits(found, parts)
    measured = {name: float(parts.of(name).mean()) for name in parts.names}
    order = [name for name, _ in parts.means()]
    order += [name for name in each if name not in order and each[name] > 0.0]
    rows = tuple((name, each.get(name, 0.0), measured.get(name, 0.0)) for name in order)
    notes = parts.run.ranks[0].notes
    plan = notes.get("plan", {})
    return PredictedStep(
        rows, _interval({name: a for name, a, _ in rows}, parts.run.world), _planned(plan.get("predicted", {}), parts),
        _what_ifs(parts, replay, plan, found.late_s / steps), str(plan.get("name", "")), steps,
    )  # fmt: skip


def _waits(found: Replayed, parts: Parts) -> dict[str, float]:
    waits: defaultdict[str, float] = defaultdict(float)
    waits[LATE] = found.late_s / parts.steps
    for group, seconds in found.exposed_s.items():
        waits[COMMUNICATION + called(group, parts.run)] += seconds / parts.steps
    return dict(waits)


def _usual(replay: Replay) -> Callable[[ReplayedOperation], float]:
    """Return what an operation takes where nothing disturbs it, by group, kind and size."""
    taken: defaultdict[tuple[Group, str, int], list[float]] = defaultdict(list)
    for one in replay.operations.values():
        taken[one.group, one.kind, one.nbytes].append(one.own_s)
    usual = {key: float(np.quantile(values, QUICK)) for key, values in taken.items()}
    return lambda one: usual[one.group, one.kind, one.nbytes]


def _interval(step: Mapping[str, float], workers: int) -> tuple[float, float]:
    """Return between which seconds a step is with 80%, as the planner says it of constants that were measured."""
    parts = dict.fromkeys(
        ("compute", "recompute", "tensor", "messages", "bubble", "gather", "gradients", "optimizer", "straggle",
         "crowding", "interference", "overhead"), 0.0,
    )  # fmt: skip
    for name, seconds in step.items():
        place = {LATE: "straggle", BUBBLE: "bubble"}.get(name, "compute")
        parts["gradients" if name.startswith(COMMUNICATION) else place] += seconds
    total = sum(parts.values())
    times = spread(
        parts, Constants(basis="measured", fitted_workers=workers), workers=workers, hidden_s=0.0, measured=True
    )
    return total / times, total * times


def _planned(predicted: Mapping[str, float], parts: Parts) -> tuple[tuple[str, float, float], ...]:
    if "step_s" not in predicted:
        return ()
    waiting = float((parts.of(LATE) + parts.of(BUBBLE)).mean())
    exposed = float(parts.communication.mean())
    measured = (parts.step_s - waiting - exposed, exposed, waiting)
    rows = [
        (name, sum(float(predicted.get(key, 0.0)) for key in keys), seconds)
        for (name, keys), seconds in zip(_PLANNED.items(), measured, strict=True)
    ]
    return (("a step", float(predicted["step_s"]), parts.step_s), *rows)


# --- what would be otherwise ------------------------------------------------------------------------------------------


def _what_ifs(parts: Parts, replay: Replay, plan: Mapping[str, Any], quiet_late_s: float) -> tuple[WhatIf, ...]:
    """Return them; `quiet_late_s` is what a step waits for late ranks that nothing disturbs."""
    if not replay.operations:
        why = "this run's ranks exchanged nothing that is recorded"
        return (WhatIf("more workers, or another network", float("nan"), (0.0, 0.0), 1.0, why),)
    latency = _latencies(replay)
    now = replay.run()

    def row(what: str, own_s: Callable[[ReplayedOperation], float], note: str = "", workers: int = 0) -> WhatIf:
        found = replay.run(own_s=own_s)
        world = parts.run.world
        waits = _waits(found, parts)
        more_late_s = 0.0
        if workers:  # the slowest of more ranks is slower
            more_late_s = quiet_late_s * (slowest_of(world + workers) / slowest_of(world) - 1.0)
        step_s = parts.step_s * found.seconds / now.seconds + more_late_s
        waits[LATE] += more_late_s
        rest_s = max(0.0, step_s - sum(waits.values()))
        within = _interval({**waits, COMPUTATION: rest_s}, world + workers)
        scale = step_s / max(sum(waits.values()) + rest_s, 1e-12)
        faster = parts.step_s / step_s * (world + workers) / world
        return WhatIf(what, step_s, (within[0] * scale, within[1] * scale), faster, note)

    def own(one: ReplayedOperation, bytes_by: float, latency_by: float = 1.0) -> float:
        late_s = min(one.own_s, latency[one.group, one.kind])
        return late_s * latency_by + (one.own_s - late_s) * bytes_by

    rows = [row("a network twice as fast", lambda one: own(one, 0.5))]
    groups = {one.group for one in replay.operations.values()}
    # Those that share batches: of the plan's data axis, or all ranks where no plan is known.
    grown = {
        one for one in groups
        if (axis_of(one[1], parts.run) == "data" if plan else len(one[1]) == parts.run.world)
    }  # fmt: skip
    replicas = max((len(ranks) for _, ranks in grown), default=0)
    if replicas < 2:
        why = "no group of ranks that share batches is recorded"
        rows.insert(0, WhatIf(f"{_MORE} more workers", float("nan"), (0.0, 0.0), 1.0, why))
    else:
        rest = max(1, parts.run.world // replicas)
        more = -(-_MORE // rest)

        def larger(one: ReplayedOperation) -> float:
            size = len(one.group[1])
            if one.group not in grown:
                return one.own_s
            wire = _wire(one.kind, size + more) / _wire(one.kind, size)
            return own(one, wire, np.log2(size + more) / np.log2(size))

        rows.insert(
            0, row(f"{more * rest} more workers", larger, "on machines and links as these", more * rest)
        )  # fmt: skip
    hosts = {one.rank: one.host for one in parts.run.ranks}
    far = {one for one in groups if len({hosts.get(rank) for rank in one[1]}) > 1}
    name = "in-network aggregation"
    if not far:
        why = "nothing would change: all ranks are on one host"
        rows.append(WhatIf(name, float("nan"), (0.0, 0.0), 1.0, why))
    else:

        def reduced(one: ReplayedOperation) -> float:
            if one.group not in far or one.kind != "all_reduce":
                return one.own_s
            return own(one, min(1.0, 1.0 / _STREAMING / _wire(one.kind, len(one.group[1]))))

        rows.append(row(name, reduced, f"switches reduce at {_STREAMING:.0%} of the link"))
    return tuple(rows)


def _latencies(replay: Replay) -> dict[tuple[Group, str], float]:
    """Return what operations of no bytes would take: on the line through the smallest and the largest ones' medians."""
    taken: defaultdict[tuple[Group, str], defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in replay.operations.values():
        taken[one.group, one.kind][one.nbytes].append(one.own_s)
    found = {}
    for key, sizes in taken.items():
        small, large = min(sizes), max(sizes)
        low_s, high_s = float(np.median(sizes[small])), float(np.median(sizes[large]))
        slope = max(0.0, (high_s - low_s) / (large - small)) if large > small else low_s / max(large, 1)
        found[key] = max(0.0, low_s - slope * small)
    return found


def _wire(kind: str, size: int) -> float:
    """Return how often each byte of the vector passes a rank's link; 1 where nothing passes."""
    return (Collective(kind, size).bus_factor if kind in KINDS else 0.0) or 1.0
