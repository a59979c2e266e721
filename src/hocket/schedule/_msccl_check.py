"""Does an MSCCL program compute what its collective promises? Its own buffers are played, not what is made of it.

Every chunk of every rank's input is a random number of 64 bits; a reduction adds, and what nobody wrote is a number of
its own, so that a wrong offset, buffer, source or order ends in a sum that is not the promised one (a false sum passes
with a probability of about 2**-64). Semantics: MSCCL's interpreter; `rrc`, `rrs` and `rrcs` add the rank's own source
to what arrives.
"""

import random
from collections.abc import Iterable
from xml.etree import ElementTree

import numpy as np

from ._collective import ScheduleError
from ._msccl_program import RECEIVES, SENDS, Blocks, MscclOperation, MscclPlaces, Place, number_of

_MASK = (1 << 64) - 1
_SIZES = {"i": "i_chunks", "o": "o_chunks", "s": "s_chunks"}

Cell = tuple[int, Place]
"""A place of one gpu."""


def check_connections(blocks: Blocks, world: int) -> None:
    """Raise ScheduleError if a connection joins no two ranks, or two thread blocks use one, or none is there."""
    used: dict[tuple[int, int, int, str], int] = {}
    for (gpu, number), block in blocks.items():
        for peer, way, verbs in ((block.send, "send", SENDS), (block.receive, "recv", RECEIVES)):
            if not -1 <= peer < world or peer == gpu:
                raise ScheduleError(f"gpu {gpu}, tb {number}: {way}={peer} is no other of the {world} ranks")
            if peer < 0:
                if alone := next((one for one in block.operations if one.verb in verbs), None):
                    raise ScheduleError(f"{alone}: the program does not end: the thread block has {way}=-1")
                continue
            other = used.setdefault((gpu, peer, block.channel, way), number)
            if other != number:
                raise ScheduleError(
                    f"gpu {gpu}: tb {other} and tb {number} share the connection {way}={peer} of channel "
                    f"{block.channel}; what passes first is not said. Give them different channels"
                )


class _Memory:
    """What every place of every rank holds, and who touched it last."""

    def __init__(self, root: ElementTree.Element, places: MscclPlaces, chunks: int) -> None:
        self.places, collective = places, places.collective
        self.sizes = {
            number_of(gpu, "id"): {buffer: number_of(gpu, name, -1) for buffer, name in _SIZES.items()}
            for gpu in root.iter("gpu")
        }
        self._random = random.Random(chunks)  # noqa: S311 - numbers that collide with nothing, not secrets
        self._values: dict[Cell, int] = {}
        self._written: dict[Cell, MscclOperation] = {}
        self._read: dict[Cell, list[MscclOperation]] = {}
        rows = np.arange(chunks) // places.pieces
        self.promised = [0] * chunks
        for rank in range(collective.world):
            for chunk in np.flatnonzero(collective.before(np.array(rank), rows)).tolist():
                value = self._values[rank, places.begin(rank, chunk)] = self._random.getrandbits(64)
                self.promised[chunk] = (self.promised[chunk] + value) & _MASK

    def cell(self, one: MscclOperation, place: Place) -> Cell:
        """Return a place of an operation; raise ScheduleError if its buffer has none there."""
        buffer, offset = place
        kind = self.places.collective.kind
        sizes = self.sizes[one.gpu]
        size = sizes.get(buffer, 0)
        if buffer in ("i", "o"):
            apart = {"i": "all_gather", "o": "reduce_scatter"}[buffer] == kind
            whole = self.places.pieces * (1 if apart else self.places.collective.vector_blocks)
            # Memory that both buffers share is as large as the larger of them.
            said = max(sizes["i"], sizes["o"]) if self.places.in_place else size
            size = min(whole, said) if said >= 0 else whole
        if buffer not in _SIZES or offset < 0 or 0 <= size <= offset:
            raise ScheduleError(
                f"{one}: {buffer}[{offset}] lies outside of the buffer, which has {max(0, size)} chunks"
            )
        return one.gpu, self.places.one_name(one.gpu, place)

    def read(self, one: MscclOperation, cell: Cell) -> int:
        """Return what a place holds; what was never written is a number that nothing else is."""
        self._ordered(one, cell, [self._written.get(cell)])
        self._read.setdefault(cell, []).append(one)
        if cell not in self._values:
            self._values[cell] = self._random.getrandbits(64)
        return self._values[cell]

    def write(self, one: MscclOperation, cell: Cell, value: int) -> None:
        self._ordered(one, cell, [self._written.get(cell), *self._read.pop(cell, [])])
        self._written[cell], self._values[cell] = one, value & _MASK

    @staticmethod
    def _ordered(one: MscclOperation, cell: Cell, before: Iterable[MscclOperation | None]) -> None:
        for other in before:
            if other is not None and other is not one and one.clock.get((other.gpu, other.block), -1) < other.number:
                buffer, offset = cell[1]
                raise ScheduleError(f"{one} and {other} both touch {buffer}[{offset}] with nothing between them")

    def check_result(self) -> None:
        """Raise ScheduleError if a rank does not hold what the collective promises it."""
        chunks = len(self.promised)
        collective = self.places.collective
        rows = np.arange(chunks) // self.places.pieces
        for rank in range(collective.world):
            for chunk in np.flatnonzero(collective.after(np.array(rank), rows)).tolist():
                place = self.places.end(rank, chunk)
                if self._values.get((rank, place)) != self.promised[chunk]:
                    raise ScheduleError(
                        f"the program breaks the contract of {collective}: in the end {place[0]}[{place[1]}] of "
                        f"gpu {rank} does not hold the result's chunk {chunk}"
                    )


def check_program(
    root: ElementTree.Element,
    places: MscclPlaces,
    chunks: int,
    ordered: list[MscclOperation],  # all operations, in an order in which they can happen
    sent: dict[int, MscclOperation],  # of each receive, by its place in that order, its send
) -> None:
    """Play a program.

    Raises:
        ScheduleError: a place outside of its buffer, two operations that touch one place in no order, one that writes
            what it has yet to read, or a result that is not the collective's.
    """
    memory = _Memory(root, places, chunks)
    carried: dict[tuple[int, int], int] = {}  # (order of a send, number of the chunk) -> what it carries
    for one in ordered:
        if one.verb == "nop":
            continue
        if one.count < 1:
            raise ScheduleError(f"{one}: cnt={one.count}; give 1 or more")
        if one.verb not in ("r", "rcs", "s", "rrs"):
            # All chunks of an operation are done at once, so none may be written that another of them reads.
            (_, read), (_, written) = (memory.cell(one, place) for place in (one.source, one.target))
            if read[0] == written[0] and 0 < abs(read[1] - written[1]) < one.count:
                raise ScheduleError(f"{one}: it writes chunks that it reads itself, and in what order is not said")
        for k in range(one.count):
            source, target = (one.source[0], one.source[1] + k), (one.target[0], one.target[1] + k)
            if one.verb == "cpy" and memory.cell(one, source) == memory.cell(one, target):
                continue  # in place, a block is copied onto itself
            arrived = carried[sent[one.order].order, k] if one.verb in RECEIVES else 0
            value = arrived
            if one.verb not in ("r", "rcs"):  # they read nothing of their own
                value += memory.read(one, memory.cell(one, source))
            if one.verb == "re":
                value += memory.read(one, memory.cell(one, target))
            if one.verb not in ("s", "rrs"):
                memory.write(one, memory.cell(one, target), value)
            if one.verb in SENDS:
                carried[one.order, k] = value & _MASK
    memory.check_result()
