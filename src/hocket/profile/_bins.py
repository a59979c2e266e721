"""Message sizes in the bins of hvprof, and bandwidths as nccl-tests define them."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.schedule import KINDS, Collective

_KIB, _MIB = 2**10, 2**20


@dataclass(frozen=True, slots=True)
class Bin:
    """Messages of more than `above` and at most `upto` bytes, so that a full 64 MiB bucket falls in 32-64 MB.

    Attributes:
        name: as reports print it; KB and MB there are powers of 1,024, as in hvprof.
        above: bytes, exclusive.
        upto: bytes, inclusive.
    """

    name: str
    above: int
    upto: int


HVPROF_BINS = (
    Bin("up to 128 KB", -1, 128 * _KIB),
    Bin("128 KB-16 MB", 128 * _KIB, 16 * _MIB),
    Bin("16-32 MB", 16 * _MIB, 32 * _MIB),
    Bin("32-64 MB", 32 * _MIB, 64 * _MIB),
    Bin("above 64 MB", 64 * _MIB, 2**63),
)
"""The bins in which MVAPICH2-GDR's hvprof reports all-reduce (EDSR on MVAPICH2-GDR), with one for the rest."""


def bus_factor(kind: str, world: int) -> float:
    """Bus bytes per byte of the full vector: what a link of a ring would carry (nccl-tests, PERFORMANCE.md).

    Args:
        kind: as in `hocket.comm.Operation`.
        world: number of ranks.
    """
    return Collective(kind, world).bus_factor if kind in KINDS else 1.0
