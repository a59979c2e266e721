"""Where one way of doing a collective gives way to another."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Where one way of doing a collective gives way to another, in bytes. Measured (benchmarks/), not derived."""

    slot: int  # bytes of one slot; a rank has two
    # bytes up to which each of three and more ranks reduces everything itself instead of sharing the work, if each has
    # a core
    one_shot: int
    piece: int  # bytes copied in one phase by the one-shot way and by plain copies
    block: int  # bytes whose reduction three and more ranks share in one phase
    chain: int  # bytes from which three and more ranks reduce one after the other in a pipeline of pieces
    direct: int  # bytes from which registered buffers are worked on in place; below, the second phase costs more
    direct_piece: int  # bytes reduced before they are written to all, so that they are still in the core's cache


CPU_SIZES = Sizes(
    slot=2 * 2**20,
    one_shot=64 * 2**10,
    piece=2**20,
    block=3 * 2**19,
    chain=4 * 2**20,
    direct=256 * 2**10,
    direct_piece=128 * 2**10,
)
