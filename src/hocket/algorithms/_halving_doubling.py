"""Recursive halving, then recursive doubling: half of the window is exchanged, then a quarter, and back."""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from hocket.schedule import Collective, Schedule, Step

from ._algorithm import ClosedForm, algorithm
from ._steps import mirrored, power_below, relabelled


def _form(collective: Collective, **_: object) -> ClosedForm:
    p, q = collective.world, power_below(collective.world)
    levels, fold, window = q.bit_length() - 1, int(p > q), Fraction(q - 1, q)
    if collective.kind != "all_reduce":
        return ClosedForm(levels, window, window, window * (collective.kind == "reduce_scatter"))
    return ClosedForm(2 * (levels + fold), 2 * window + fold, 2 * (window + fold), window + fold)


def _limit(collective: Collective, *, order: str) -> str | None:
    p = collective.world
    if order not in ("halving", "doubling"):
        return f"order={order!r}; give 'halving' or 'doubling'"
    if collective.kind != "all_reduce" and p != power_below(p):
        return f"{collective.kind} needs a power of two of ranks, not {p}; circulant serves every number"
    return None


def halving(p: int, order: str) -> list[Step]:
    """Return the reduce_scatter of p = 2^n ranks over p chunks that windows make contiguous.

    With order "halving" the distance is p/2, p/4 .. 1 (the largest message travels farthest) and rank r ends with
    chunk r. With "doubling" it is 1, 2 .. p/2 and rank r ends with the chunk whose number is r's bits reversed.
    """
    rank, start, length, steps = np.arange(p), np.zeros(p, np.int64), p, []
    for k in range(p.bit_length() - 1):
        distance = p >> (k + 1) if order == "halving" else 1 << k
        length //= 2
        upper = (rank & distance) > 0  # this rank keeps the upper half of its window
        give = start + np.where(upper, 0, length)
        steps.append(Step.of(rank, rank ^ distance, give, give + length, reduce=True))
        start = start + np.where(upper, length, 0)
    return steps


def bits_reversed(p: int) -> NDArray[np.int64]:
    """Return the numbers 0 to p - 1 = 2^n - 1, each with its n bits in reverse."""
    number, turned = np.arange(p), np.zeros(p, np.int64)
    for bit in range(p.bit_length() - 1):
        turned = turned << 1 | number >> bit & 1
    return turned


@algorithm(
    title="Halving-doubling",
    source="Rabenseifner 2004; Thakur, Rabenseifner and Gropp, Optimization of collective communication in MPICH, 2005",
    kinds=("all_reduce", "reduce_scatter", "all_gather"),
    form=_form,
    limit=_limit,
)
def halving_doubling(collective: Collective, *, order: str = "halving") -> Schedule:
    """Build it in either order of distances.

    all_reduce serves any world: ranks above the largest power of two give to a partner before, and get it back after.
    reduce_scatter and all_gather are for powers of two; in order "doubling" they take some world^2 transfers.

    Args:
        collective: An all_reduce, reduce_scatter or all_gather.
        order: Order of the distances while halving, "halving" (p/2 .. 1) or "doubling" (1 .. p/2); back in reverse.
    """
    p, q = collective.world, power_below(collective.world)
    if collective.kind != "all_reduce":
        down = halving(p, order)
        if order == "doubling":  # the windows of block r at rank r are every second, fourth .. block
            down = relabelled(down, bits_reversed(p))
        steps = down if collective.kind == "reduce_scatter" else mirrored(down, reduce=False)
        return Schedule("halving_doubling", collective, p, tuple(steps))
    down = halving(q, order)
    steps = [*down, *mirrored(down, reduce=False)]
    if p > q:
        low = np.arange(p - q)
        steps = [Step.of(low + q, low, 0, q, reduce=True), *steps, Step.of(low, low + q, 0, q, reduce=False)]
    return Schedule("halving_doubling", collective, q, tuple(steps))
