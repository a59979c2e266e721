"""Dissemination: every rank tells ranks ahead of it, around the ring, at distances that multiply."""

from fractions import Fraction

import numpy as np

from hocket.schedule import Collective, Schedule, Step

from ._algorithm import ClosedForm, algorithm


def _factors(number: int) -> list[int]:
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found


def _form(collective: Collective) -> ClosedForm:
    factors = _factors(collective.world)
    told = sum(factors) - len(factors)
    return ClosedForm(len(factors), Fraction(told), Fraction(told), Fraction(told), messages=told)


@algorithm(
    title="Dissemination",
    source="Hensgen, Finkel and Manber, Two algorithms for barrier synchronization, 1988; n-way: Hoefler et al., 2006",
    kinds=("barrier",),
    form=_form,
)
def dissemination(collective: Collective) -> Schedule:
    """Build one step for each prime factor f of the world's size, in which a rank tells f - 1 others.

    With 2 in every step a rank may hear of others twice, which does a barrier no harm; with the factors each window is
    filled exactly. Sums would be exact too, but every rank would add in another order and get other bits, so it is not
    offered for all_reduce.
    """
    rank, steps, distance = np.arange(collective.world)[:, None], [], 1
    for factor in _factors(collective.world):
        ahead = (rank + distance * np.arange(1, factor)) % collective.world
        steps.append(Step.of(np.broadcast_to(rank, ahead.shape).ravel(), ahead.ravel(), reduce=True))
        distance *= factor
    return Schedule("dissemination", collective, 1, tuple(steps))
