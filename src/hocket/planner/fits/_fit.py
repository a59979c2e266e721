"""Constants that are fitted on plans that were run: what no formula knows of ranks that share processors and links.

A few plans, one of each form, say what a stage, a block or an exchange costs this model on these ranks; all others
follow from the same constants, none of which moves further than measurements of it might be wrong. What a run is off by
then is carried to its own plan, and less to those like it (`_likeness.py`).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hocket.workload import Workload

from ..axes import inner, sharing
from ..network import Constants, Network
from ..plan import Plan
from ..step import NOISE, Profile, in_precision, memory_of, place, predict, weights

# How far (standard deviation of the natural logarithm) each constant may be from what small models said of it.
_BELIEF = {
    "at_once": 0.25,
    "step_s": 0.7,
    "pass_s": 1.0,  # of a small model, with few tensors
    "stage_s": 0.7,
    "optimizer_shard_s": 0.7,
    "gradient_shard_s": 0.7,
    "block_s": 0.7,
    "block_wait_s": 0.7,
    "divided_times": 0.3,  # from nearly half to more than twice, as weights of layers stay in caches or do not
    "exchange_s": 0.7,
    "exchange_share": 0.7,
    "message_share": 0.5,  # begins with what collectives reach
}
# Of which plans a constant says nothing: their steps need not be worked out again to see what it changes.
_NOT_OF: dict[str, Callable[[Plan], bool]] = {
    "pass_s": lambda plan: plan.pipeline_parallel_degree > 1,
    "stage_s": lambda plan: plan.pipeline_parallel_degree == 1,
    "message_share": lambda plan: plan.pipeline_parallel_degree == 1,
    "optimizer_shard_s": lambda plan: plan.shard in ("none", "parameters"),
    "gradient_shard_s": lambda plan: plan.shard != "gradients",
    "block_s": lambda plan: plan.shard != "parameters",
    "block_wait_s": lambda plan: plan.shard != "parameters",
    **dict.fromkeys(("divided_times", "exchange_s", "exchange_share"), lambda plan: sharing(plan)[1] == 1),
}
_FARTHEST = 3.0  # such deviations
# Of them, the distance over which slopes are taken: a pipeline that waits for messages, and whose cuts move, takes as
# long for a while and then longer, of which a short step sees nothing.
_STEP = 0.1
# What no formula knows of a plan, as a part of a step, before runs say more, and as how many runs that counts: that of
# 425 plans half were predicted within 8.2% (benchmarks/2026-11-22-plans.md).
_UNSEEN, _UNSEEN_RUNS = 0.12, 2.0
_LEAST = 0.002  # of the shortest step: what a cost that was measured to be nothing begins from
_SEVERAL = 4  # times the fewest parts of a batch: what a part costs must be seen, too


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan that was run.

    Attributes:
        plan: Which.
        step_s: Seconds of a step of its slowest rank.
    """

    plan: Plan
    step_s: float


def reference_plans(plans: Iterable[Plan], workers: int) -> list[Plan]:
    """Those of some plans that stand for their forms.

    Data parallelism; with a sharded optimizer, or sharded parameters, among all ranks and among those of a host; each
    other axis with its least degree and with its largest, with one stage of each rank. All with the fewest parts of a
    batch that there are and, but for the sharded optimizer, with four times as many; with sharded gradients, which are
    reduced for every part, with those only.

    Args:
        plans: Admissible ones.
        workers: How many.
    """
    forms: dict[tuple[str, int, tuple[int, ...]], list[Plan]] = {}
    for plan in plans:
        one = plan.resolve(workers)
        degrees = tuple(axis.degree(one) for axis in inner())
        ways = (one.shard != "none") + sum(degree > 1 for degree in degrees)
        if ways <= 1 and not one.recompute and one.stages_per_rank == 1:
            forms.setdefault((one.shard, one.shard_degree, degrees), []).append(plan)
    ends = [{degree for degree in column if degree > 1} for column in zip(*(form[-1] for form in forms), strict=True)]
    found = []
    for (shard, _, degrees), alike in forms.items():
        if any(degree > 1 and degree not in (min(end), max(end)) for degree, end in zip(degrees, ends, strict=True)):
            continue
        parts = {plan.micro_batches * plan.accumulate: plan for plan in alike}
        fewest = min(parts)
        wanted = {"optimizer": (fewest,), "gradients": (_SEVERAL * fewest,)}.get(shard, (fewest, _SEVERAL * fewest))
        found += [parts[count] for count in wanted if count in parts]
    return found


def fitted(
    runs: Sequence[MeasuredPlan], workload: Workload, network: Network, constants: Constants, *, batch: int
) -> tuple[Network, Constants]:
    """Return the network and the constants with which the formulas come nearest to what was measured.

    The maximum of the posterior: errors of steps are weighed against how far constants are from what they were, both by
    their ratios. A run that is off by more than noise counts less (Huber-like, scipy's soft_l1).

    Args:
        runs: What was measured, all on the ranks of the network.
        workload: What was trained.
        network: The ranks'; of it `at_once` moves, if its ranks share processors.
        constants: As far as they are known; those of `_BELIEF` move.
        batch: Samples of a global batch.

    Raises:
        PlanError: a plan cannot be timed.
    """
    from scipy.optimize import least_squares

    if not runs:
        return network, dataclasses.replace(constants, unmodelled=_UNSEEN)
    constants = dataclasses.replace(constants, seen=())
    least = _LEAST * min(run.step_s for run in runs)
    names = [name for name in _BELIEF if name != "at_once" or network.at_once]

    def moved(values: Sequence[float]) -> tuple[Network, Constants]:
        times = {name: math.exp(value * _BELIEF[name]) for name, value in zip(names, values, strict=True)}
        at_once = min(network.world, max(1.0, network.at_once * times.pop("at_once", 1.0))) if network.at_once else 0.0
        new = {}
        for name, factor in times.items():
            known = getattr(constants, name)
            new[name] = (max(least, known) if name.endswith("_s") else known) * factor
            if name.endswith("_share"):
                new[name] = min(1.0, new[name])
        return dataclasses.replace(network, at_once=at_once), dataclasses.replace(constants, **new)

    # What is the same whatever the constants are.
    workloads = {run.plan.precision: in_precision(run.plan, workload) for run in runs}
    plans = [run.plan.resolve(network.world) for run in runs]
    memories = [memory_of(plan, workload, batch=batch) for plan in plans]

    def logs(values: Sequence[float], of: Sequence[int]) -> list[float]:
        """Return by how much some of the runs are predicted to take longer than they did, as logarithms."""
        wires, now = moved(values)
        profiles = {name: Profile(one, wires, now) for name, one in workloads.items()}
        foretold = (
            predict(
                runs[one].plan, workload, wires, workers=network.world, batch=batch, constants=now,
                profile=profiles[runs[one].plan.precision], memory=memories[one],
            )
            for one in of
        )  # fmt: skip
        return [math.log(each.step_s / runs[one].step_s) for one, each in zip(of, foretold, strict=True)]

    def residuals(values: np.ndarray) -> np.ndarray:
        return np.concatenate([np.array(logs(values.tolist(), range(len(runs)))) / NOISE, values])

    def slopes(values: np.ndarray) -> np.ndarray:
        here = residuals(values)
        found = np.zeros((len(here), len(names)))
        for number, (name, value) in enumerate(zip(names, values, strict=True)):
            step = _STEP if value + _STEP < _FARTHEST else -_STEP
            there = values.copy()
            there[number] += step
            of = [one for one, run in enumerate(runs) if name not in _NOT_OF or not _NOT_OF[name](plans[one])]
            found[of, number] = (np.array(logs(there.tolist(), of)) / NOISE - here[of]) / step
            found[len(runs) + number, number] = 1.0
        return found

    # A share of 1 can only become less, which a step to both sides would not show. Pipelines that wait for messages
    # have a second optimum, where stages cost more: the better one counts.
    begin = [-_STEP if name.endswith("_share") and getattr(constants, name) == 1 else 0.0 for name in names]
    dearer = [value + 1.0 if name.endswith("_s") else value for name, value in zip(names, begin, strict=True)]
    limits = {"bounds": (-_FARTHEST, _FARTHEST), "loss": "soft_l1", "ftol": 1e-3, "xtol": 1e-3}
    best = min((least_squares(residuals, one, slopes, **limits) for one in (begin, dearer)), key=lambda one: one.cost)
    # The runs that are most off were disturbed.
    errors = [NOISE * error for error in residuals(best.x)[: len(runs)].tolist()]
    squares = sum(min(abs(error), _FARTHEST * NOISE) ** 2 for error in errors)
    unmodelled = math.sqrt((_UNSEEN_RUNS * _UNSEEN**2 + squares) / (_UNSEEN_RUNS + len(runs)))
    places = [place(plan) for plan in plans]
    off = weights(places, [-error for error in errors], unmodelled, NOISE)
    seen = tuple(zip(places, off, strict=True))
    network, constants = moved(best.x.tolist())
    return network, dataclasses.replace(constants, unmodelled=unmodelled, fitted_workers=network.world, seen=seen)
