"""All-to-all: pairwise, where every block goes straight to its rank, and Bruck, where blocks travel together."""

from fractions import Fraction

import numpy as np

from hocket.schedule import Collective, Schedule, Step

from ._algorithm import ClosedForm, algorithm
from ._steps import check_count, rounds


def _pairwise_form(collective: Collective) -> ClosedForm:
    part = Fraction(collective.world - 1, collective.world)
    return ClosedForm(collective.world - 1, part, part)


@algorithm(
    title="Pairwise",
    source="Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005",
    kinds=("all_to_all",),
    form=_pairwise_form,
)
def pairwise(collective: Collective) -> Schedule:
    """Build world - 1 steps; in step k rank r sends one block to rank r + k and receives one from rank r - k."""
    p = collective.world
    check_count(p * (p - 1))
    rank = np.arange(p)
    steps = [Step.of(rank, (rank + k) % p, rank * p + (rank + k) % p, reduce=False) for k in range(1, p)]
    return Schedule("pairwise", collective, p * p, tuple(steps))


def _bruck_form(collective: Collective) -> ClosedForm:
    p = collective.world
    hops = Fraction(sum(offset.bit_count() for offset in range(p)), p)  # a block travels the ones of its distance
    return ClosedForm(rounds(p), hops, hops)


@algorithm(
    title="Bruck",
    source="Bruck et al., Efficient algorithms for all-to-all communications in multiport systems, 1997",
    kinds=("all_to_all",),
    form=_bruck_form,
)
def bruck(collective: Collective) -> Schedule:
    """Build ceil(log2 world) steps; in step k the blocks whose distance has bit k set go 2^k ranks further.

    Fewer latencies than pairwise, for about log2(world) / 2 times the bytes.
    """
    p = collective.world
    check_count(p * p * rounds(p) // 2)
    home, distance = np.meshgrid(np.arange(p), np.arange(p), indexing="ij")
    steps = []
    for k in range(rounds(p)):
        moves = (distance >> k & 1) > 0
        at = home[moves] + (distance[moves] & ((1 << k) - 1))  # where the steps before have brought it
        block = home[moves] * p + (home + distance)[moves] % p
        steps.append(Step.of(at % p, (at + (1 << k)) % p, block, reduce=False))
    return Schedule("bruck", collective, p * p, tuple(steps))
