"""Recursive halving, then recursive doubling: half of the window is exchanged, then a quarter, and back."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from hocket.schedule import Collective, Schedule, Step

from ._algorithm import Form, algorithm
from ._steps import mirrored, power_below


def _form(collective: Collective, *, order: str = "halving") -> Form:
    p, q = collective.world, power_below(collective.world)
    levels, fold, window = q.bit_length() - 1, int(p > q), Fraction(q - 1, q)
    if collective.kind != "all_reduce":
        return Form(levels, window, window, window * (collective.kind == "reduce_scatter"))
    return Form(2 * (levels + fold), 2 * window + fold, 2 * (window + fold), window + fold)


def _limit(collective: Collective, *, order: str = "halving") -> str | None:
    p = collective.world
    if order not in ("halving", "doubling"):
        return f"order={order!r}; give 'halving' or 'doubling'"
    if collective.kind != "all_reduce" and p != power_below(p):
        return f"{collective.kind} needs a power of two of ranks, not {p}; circulant serves every number"
    return None


def halving(p: int, order: str) -> list[Step]:
    """The reduce_scatter of p = 2^n ranks over p chunks that windows make contiguous.

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


def _scattered(p: int) -> list[Step]:
    """The reduce_scatter in order "doubling" to block r at rank r: its windows are every second, fourth .. block."""
    rank, steps = np.arange(p)[:, None], []
    for k in range(p.bit_length() - 1):
        distance = 1 << k
        partner = rank ^ distance
        blocks = (partner & (2 * distance - 1)) + 2 * distance * np.arange(p // (2 * distance))
        source, destination = np.broadcast_to(rank, blocks.shape), np.broadcast_to(partner, blocks.shape)
        steps.append(Step.of(source.ravel(), destination.ravel(), blocks.ravel(), reduce=True))
    return steps


@algorithm(
    title="Halving-doubling",
    source="Rabenseifner 2004; Thakur, Rabenseifner and Gropp, Optimization of collective communication in MPICH, 2005",
    kinds=("all_reduce", "reduce_scatter", "all_gather"),
    form=_form,
    limit=_limit,
)
def halving_doubling(collective: Collective, *, order: str = "halving") -> Schedule:
    """Builds it in either order of distances.

    all_reduce serves any world: ranks above the largest power of two give to a partner before, and get it back after.
    reduce_scatter and all_gather are for powers of two.

    Args:
        collective: all_reduce, reduce_scatter or all_gather.
        order: of the distances while halving, "halving" (p/2 .. 1) or "doubling" (1 .. p/2); back in reverse.
    """
    p, q = collective.world, power_below(collective.world)
    if collective.kind != "all_reduce":
        down = halving(p, order) if order == "halving" else _scattered(p)
        steps = down if collective.kind == "reduce_scatter" else mirrored(down, reduce=False)
        return Schedule("halving_doubling", collective, p, tuple(steps))
    down = halving(q, order)
    steps = [*down, *mirrored(down, reduce=False)]
    if p > q:
        low = np.arange(p - q)
        steps = [Step.of(low + q, low, 0, q, reduce=True), *steps, Step.of(low, low + q, 0, q, reduce=False)]
    return Schedule("halving_doubling", collective, q, tuple(steps))
