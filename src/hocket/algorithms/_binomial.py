"""Binomial tree: whoever has the data sends it on, to twice as many ranks in every step."""

from fractions import Fraction

import numpy as np

from hocket.schedule import Collective, Schedule, Step

from ._algorithm import ClosedForm, algorithm
from ._steps import mirrored, piece_limit, pipelined, placed, power_below, relabelled, rounds

_SOURCE = "Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005"


def _form(collective: Collective, *, pieces: int) -> ClosedForm:
    p, kind = collective.world, collective.kind
    depth, all_but_one = rounds(p), Fraction(p - 1, p)
    if kind == "scatter":
        return ClosedForm(depth, all_but_one, all_but_one)
    if kind == "gather":
        return ClosedForm(depth, Fraction(largest_subtree(p), p), all_but_one)
    passed = Fraction(depth)  # by the root, whose port is never idle
    sent, reduced = (Fraction(1), passed) if kind == "reduce" else (passed, Fraction(0))
    return ClosedForm(depth + pieces - 1, sent, passed, reduced, messages=depth * pieces)


def largest_subtree(p: int) -> int:
    """Return the ranks in the largest part of a binomial tree of p ranks that hangs on another rank."""
    top = power_below(p - 1)
    return max(p - top, top // 2)


def scattering(p: int) -> list[Step]:
    """Return the scatter of p chunks from rank 0: a rank with a window gives the upper half of it away."""
    steps = []
    for distance in (1 << k for k in reversed(range(rounds(p)))):
        holder = np.arange(0, p - distance, 2 * distance)
        other = holder + distance
        steps.append(Step.of(holder, other, other, np.minimum(other + distance, p), reduce=False))
    return steps


@algorithm(
    title="Binomial tree",
    source=_SOURCE,
    kinds=("broadcast", "reduce", "scatter", "gather"),
    form=_form,
    limit=piece_limit,
)
def binomial(collective: Collective, *, pieces: int = 1) -> Schedule:
    """Build ceil(log2 world) steps from, or to, any root.

    Args:
        collective: Broadcast, reduce, scatter or gather of any world.
        pieces: Number of pieces that broadcast and reduce cut the vector into; with one port they only add latencies.
    """
    p, kind = collective.world, collective.kind
    place = (np.arange(p) + collective.root) % p  # rank 0 of the tree is the root
    if kind in ("scatter", "gather"):
        steps, chunks = relabelled(placed(scattering(p), place), place), p
    else:
        having = [np.arange(min(1 << k, p - (1 << k))) for k in range(rounds(p))]
        stages = [Step.of(place[low], place[low + (1 << k)], reduce=False) for k, low in enumerate(having)]
        steps, chunks = pipelined(stages, pieces), pieces
    if kind in ("reduce", "gather"):
        steps = mirrored(steps, reduce=kind == "reduce")
    return Schedule("binomial", collective, chunks, tuple(steps))
