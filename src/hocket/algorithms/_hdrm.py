"""Halving-doubling with rank mapping: on a BiGraph every flow of every step has a link of its own."""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from hocket.schedule import Collective, Schedule

from ._algorithm import ClosedForm, algorithm
from ._halving_doubling import bits_reversed, halving
from ._steps import mirrored, placed, power_below, relabelled


def _shape(world: int, upper: int | None, ports: int | None) -> tuple[int, int]:
    """Return (upper, ports); by default the squarest that the world fills, with no more ports than upper switches."""
    if upper is None and ports is None:
        ports = 1 << ((world.bit_length() - 2) // 2)
    if upper is None:
        upper = world // (2 * (ports or 1))
    if ports is None:
        ports = world // (2 * (upper or 1))
    return upper, ports


def _form(collective: Collective, **_: object) -> ClosedForm:
    p, kind = collective.world, collective.kind
    part, phases = Fraction(p - 1, p), 2 if kind == "all_reduce" else 1
    return ClosedForm(phases * (p.bit_length() - 1), phases * part, phases * part, part * (kind != "all_gather"))


def _limit(collective: Collective, *, upper: int | None, ports: int | None, order: str) -> str | None:
    h, m = _shape(collective.world, upper, ports)
    if order not in ("halving", "doubling"):
        return f"order={order!r}; give 'halving' or 'doubling'"
    if h < 1 or m < 1 or h != power_below(h) or m != power_below(m) or 2 * h * m != collective.world:
        return (
            f"a BiGraph of {h} upper and {h} lower switches with {m} ports each has {2 * h * m} ranks; both numbers "
            "must be powers of two and all ports in use; halving_doubling serves any world"
        )
    return None


def hdrm_places(upper: int, ports: int) -> NDArray[np.int64]:
    """Return which physical rank plays each rank of halving-doubling.

    Physical ranks are in the order of the BiGraph: the slots of upper switch 0, of upper switch 1 .., then of the
    lower ones. Rank r = v * 2 * upper + 2 * i + b, with slot v, stands at upper switch (i + v) mod upper if the number
    of ones in r is even, else at lower switch i: partners differ in one bit, so they are always in opposite parts and
    share a direct link, and those of one switch are at different switches as long as ports <= upper.

    Returns:
        `(2 * upper * ports,)`, an order of the ranks.
    """
    rank = np.arange(2 * upper * ports)
    slot, i = rank // (2 * upper), rank % (2 * upper) // 2
    odd = np.zeros(len(rank), np.int64)
    for bit in range(len(rank).bit_length()):
        odd ^= rank >> bit & 1
    return np.asarray(np.where(odd, (upper + i) * ports, (i + slot) % upper * ports) + slot, np.int64)


@algorithm(
    title="Rank-mapped halving-doubling (HDRM)",
    source="Dong et al., EFLOPS: algorithm and system co-design for a high performance distributed training platform, "
    "HPCA 2020; the mapping as in the simulator of MultiTree (Huang et al., ISCA 2021)",
    kinds=("all_reduce", "reduce_scatter", "all_gather"),
    form=_form,
    limit=_limit,
    planned=(),
)
def hdrm(
    collective: Collective, *, upper: int | None = None, ports: int | None = None, order: str = "halving"
) -> Schedule:
    """Build halving-doubling with the ranks where the BiGraph gives each flow of a step its own link.

    Args:
        collective: An all_reduce of `2 * upper * ports` ranks in the physical order of the BiGraph (see `hdrm_places`);
            reduce_scatter and all_gather, with some world^2 transfers.
        upper: Upper switches, as many as lower ones, a power of two.
        ports: Ranks at each switch, a power of two; up to `upper` of them have links of their own.
        order: Order of the distances, as for `halving_doubling`.
    """
    p, kind = collective.world, collective.kind
    place = hdrm_places(*_shape(p, upper, ports))
    down = placed(halving(p, order), place)
    if kind != "all_reduce":  # where halving leaves chunk c is the rank whose block it must be
        down = relabelled(down, place[bits_reversed(p)] if order == "doubling" else place)
    back = mirrored(down, reduce=False)
    steps = {"all_reduce": [*down, *back], "reduce_scatter": down, "all_gather": back}[kind]
    return Schedule("hdrm", collective, p, tuple(steps))
