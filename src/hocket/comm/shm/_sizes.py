"""Where one way of doing a collective gives way to another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Where one way of doing a collective gives way to another, in bytes. Measured (benchmarks/), not derived.

    Attributes:
        slot: room of one slot; a rank has two.
        one_shot: up to this, every rank of three and more reduces everything itself instead of sharing the work, if
            each has a core.
        piece: how much is copied in one phase by the one-shot way and by plain copies.
        block: how much three and more ranks share the reduction of in one phase.
        chain: from this on, three and more ranks reduce one after the other in a pipeline of pieces.
        direct: from this on, registered buffers are worked on in place; below, the second phase costs more.
        direct_piece: how much is reduced before it is written to all, so that it is still in the core's cache.
    """

    slot: int
    one_shot: int
    piece: int
    block: int
    chain: int
    direct: int
    direct_piece: int


CPU_SIZES = Sizes(
    slot=2 * 2**20,
    one_shot=64 * 2**10,
    piece=2**20,
    block=3 * 2**19,
    chain=4 * 2**20,
    direct=256 * 2**10,
    direct_piece=128 * 2**10,
)
