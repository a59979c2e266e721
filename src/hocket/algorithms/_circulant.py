"""Circulant: distances double as in recursive doubling, but around a ring of any number of ranks."""

from fractions import Fraction

import numpy as np

from hocket.schedule import Collective, Schedule, Step

from ._algorithm import ClosedForm, algorithm
from ._steps import mirrored, rounds, wrapped


def _form(collective: Collective) -> ClosedForm:
    p, kind = collective.world, collective.kind
    part, phases = Fraction(p - 1, p), 2 if kind == "all_reduce" else 1
    return ClosedForm(phases * rounds(p), phases * part, phases * part, part * (kind != "all_gather"))


def gathering(p: int) -> list[Step]:
    """Return the all_gather of p ranks and blocks: with d blocks from its own on, rank r sends them to rank r - d."""
    rank, steps = np.arange(p), []
    for k in range(rounds(p)):
        distance = 1 << k
        known = min(distance, p - distance)  # the receiver has the rest in the last step
        steps.append(wrapped(rank, (rank - distance) % p, rank, known, p, reduce=False))
    return steps


@algorithm(
    title="Circulant (Bruck)",
    source="Bruck et al., Efficient algorithms for all-to-all communications, 1997; Traff, Optimal non-pipelined "
    "reduce-scatter and allreduce algorithms, 2024",
    kinds=("all_reduce", "reduce_scatter", "all_gather"),
    form=_form,
)
def circulant(collective: Collective) -> Schedule:
    """Build ceil(log2 world) steps a phase that move the fewest bytes, for any world.

    reduce_scatter is all_gather backwards: a block is collected along the tree on which it would spread.
    """
    gather = gathering(collective.world)
    scatter = mirrored(gather, reduce=True)
    steps = {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": [*scatter, *gather]}[collective.kind]
    return Schedule("circulant", collective, collective.world, tuple(steps))
