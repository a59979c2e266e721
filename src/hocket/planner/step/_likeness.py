"""What runs of plans say of plans like them, beyond what any formula knows.

After the fit each run is still off by something: a kernel that is slow at one shape, layers that stay in a cache. That
is carried to the plan itself, and less to others the less they are like it: kriging, as of a field that was sampled at
some points (Krige 1951; Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, chapter 2). Distances
were chosen on twelve models (benchmarks/2026-11-24-own-models.md).
"""

import math
from collections.abc import Sequence

import numpy as np

from ..axes import copy_group, inner
from ..network import Constants
from ..plan import Plan

_SHARDS = {"none": 0.0, "optimizer": 1.0, "gradients": 1.5, "parameters": 3.0}
_FORM, _PARTS, _STAGES, _COPIES = 3.0, 0.5, 1.0, 0.5  # distances of twice as much
_LONGER = 0.25  # of the natural logarithm: what a run may be longer than predicted, and not be taken for disturbed


def place(plan: Plan) -> tuple[float, ...]:
    """Return where a plan, with all degrees filled in, lies among others; distances are those of its coordinates."""
    return (
        *(_FORM * math.log2(axis.degree(plan)) for axis in inner()),
        _SHARDS[plan.shard],
        _COPIES * math.log2(copy_group(plan)[0]),
        _PARTS * math.log2(plan.micro_batches * plan.accumulate),
        _STAGES * math.log2(plan.stages_per_rank),
        float(plan.recompute),
    )


def likeness(one: Sequence[float], other: Sequence[float]) -> float:
    """Return how alike two plans at these places err, from 0 to 1."""
    return math.exp(-sum(abs(a - b) for a, b in zip(one, other, strict=True)))


def resemblance(one: Plan, other: Plan) -> float:
    """Return the same of two plans, with all degrees filled in."""
    return likeness(place(one), place(other))


def weights(places: Sequence[Sequence[float]], off: Sequence[float], deviation: float, noise: float) -> list[float]:
    """Return the weight of each run's likeness, so that the weighted sum is what a plan there is off by.

    Args:
        places: Of the plans that were run.
        off: Natural logarithms of measured by predicted steps. Disturbances make a run longer, so it counts as at most
            a quarter longer.
        deviation: Standard deviation of what no formula knows.
        noise: Standard deviation of a measurement.
    """
    alike = np.array([[likeness(one, other) for other in places] for one in places])
    covariance = deviation**2 * alike + noise**2 * np.eye(len(places))
    solved = np.linalg.solve(covariance, np.minimum(np.array(off), _LONGER))
    return [float(value) for value in deviation**2 * solved]


def alike(plan: Plan, constants: Constants, workers: int) -> float:
    """Return how like a plan is, from 0 to 1, to the run that is most like it; 0 where other numbers of workers ran."""
    if not constants.seen or workers != constants.fitted_workers:
        return 0.0
    here = place(plan)
    return max(likeness(here, other) for other, _ in constants.seen)


def untried(plan: Plan, constants: Constants) -> tuple[str, ...]:
    """Return names of the axes that a plan uses and no run did; none where no runs are known."""
    if not constants.seen:
        return ()
    used = zip(inner(), zip(*(where for where, _ in constants.seen), strict=True), strict=False)  # axes come first
    return tuple(axis.name for axis, column in used if axis.degree(plan) > 1 and not any(column))


def longer(plan: Plan, constants: Constants, workers: int) -> float:
    """Return how many times as long a step of a plan takes as formulas say, as far as runs of like plans tell."""
    if not constants.seen or workers != constants.fitted_workers:
        return 1.0
    here = place(plan)
    return math.exp(sum(weight * likeness(here, other) for other, weight in constants.seen))


def least_longer(constants: Constants, workers: int) -> float:
    """Return what `longer` is at least, of any plan."""
    if workers != constants.fitted_workers:
        return 1.0
    return math.exp(sum(min(0.0, weight) for _, weight in constants.seen))
