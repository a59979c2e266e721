"""Recursive doubling: in step k partners at distance 2^k exchange all they have."""

from fractions import Fraction

import numpy as np

from hocket.schedule import Collective, Schedule, Step

from ._algorithm import ClosedForm, algorithm
from ._steps import power_below


def _form(collective: Collective) -> ClosedForm:
    p, q = collective.world, power_below(collective.world)
    levels, folds = q.bit_length() - 1, int(p > q)
    if collective.kind == "all_gather":
        return ClosedForm(levels, Fraction(p - 1, p), Fraction(p - 1, p))
    return ClosedForm(
        levels + 2 * folds, Fraction(levels + folds), Fraction(levels + 2 * folds), Fraction(levels + folds)
    )


def _limit(collective: Collective) -> str | None:
    p = collective.world
    if collective.kind == "all_gather" and p != power_below(p):
        return f"all_gather needs a power of two of ranks, not {p}; circulant serves every number"
    return None


@algorithm(
    title="Recursive doubling",
    source="Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005",
    kinds=("all_reduce", "barrier", "all_gather"),
    form=_form,
    limit=_limit,
)
def recursive_doubling(collective: Collective) -> Schedule:
    """Build it for any world; ranks above the largest power of two give to a partner before, and get it back after.

    all_gather, whose windows double, is for powers of two.
    """
    p, q = collective.world, power_below(collective.world)
    rank, low = np.arange(q), np.arange(p - q)
    distances = [1 << k for k in range(q.bit_length() - 1)]
    if collective.kind == "all_gather":
        windows = [(rank & -d, d) for d in distances]
        steps = [Step.of(rank, rank ^ d, start, start + d, reduce=False) for start, d in windows]
        return Schedule("recursive_doubling", collective, p, tuple(steps))
    steps = [Step.of(rank, rank ^ d, reduce=True) for d in distances]
    if len(low):
        steps = [Step.of(low + q, low, reduce=True), *steps, Step.of(low, low + q, reduce=False)]
    return Schedule("recursive_doubling", collective, 1, tuple(steps))
