"""Scatter and all-gather: a long vector is broadcast in parts, which then meet; backwards it is a reduce."""

from fractions import Fraction

import numpy as np

from hocket.schedule import Collective, Schedule

from ._algorithm import ClosedForm, algorithm
from ._binomial import largest_subtree, scattering
from ._circulant import gathering
from ._steps import mirrored, placed, rounds


def _form(collective: Collective) -> ClosedForm:
    p = collective.world
    part, steps = Fraction(p - 1, p), 2 * rounds(p)
    if collective.kind == "reduce":
        return ClosedForm(steps, part + Fraction(largest_subtree(p), p), 2 * part, part)
    return ClosedForm(steps, 2 * part, 2 * part)


@algorithm(
    title="Scatter and all-gather",
    source="van de Geijn, On global combine operations, 1994; Rabenseifner 2004 for reduce",
    kinds=("broadcast", "reduce"),
    form=_form,
)
def scatter_gather(collective: Collective) -> Schedule:
    """Build a broadcast of a binomial scatter and a circulant all_gather, for any world and root.

    reduce is its mirror image: reduce_scatter and gather.
    """
    p = collective.world
    steps = [*scattering(p), *gathering(p)]
    if collective.kind == "reduce":
        steps = [*mirrored(gathering(p), reduce=True), *mirrored(scattering(p), reduce=False)]
    steps = placed(steps, (np.arange(p) + collective.root) % p)
    return Schedule("scatter_gather", collective, p, tuple(steps))
