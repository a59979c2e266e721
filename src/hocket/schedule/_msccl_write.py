"""Writes a schedule as MSCCL XML, the classic form with one `step` an operation, for MSCCL's runtime and tools.

Every rank gets a thread block for each peer it sends to and one for each it receives from; if there is one of both, as
in a ring, they share a block. A block does its steps in order; an operation that must come after one of another block
names it (`depid`, `deps`), and since it can name only one, `nop` steps before it name the others. See the format in
msccl-tools (github.com/microsoft/msccl-tools), `msccl/language/ir.py`.
"""

from dataclasses import dataclass, field
from typing import Final
from xml.etree import ElementTree

from ._collective import ScheduleError
from ._ir import Schedule
from ._msccl_program import MscclPlaces, Place

NAMES: Final = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
"""MSCCL's names; a gather, a scatter or a barrier it does not have."""


def to_msccl(schedule: Schedule, *, protocol: str = "Simple") -> str:
    """Write a schedule as MSCCL XML.

    All kinds but all_to_all are in place: all_gather in the output buffer, the others in the input buffer.

    Args:
        schedule: A schedule of ranks only.
        protocol: NCCL's: Simple, LL or LL128.

    Raises:
        ScheduleError: switches take part, or MSCCL has no such collective.
    """
    collective = schedule.collective
    if schedule.switches:
        raise ScheduleError(f"{schedule.name}: MSCCL has no switches that reduce; only ranks can be written")
    if collective.kind not in NAMES:
        raise ScheduleError(f"MSCCL has no {collective.kind}; it has {', '.join(NAMES)}")
    root = ElementTree.Element(
        "algo",
        name=schedule.name,
        proto=protocol,
        nchannels="1",
        nchunksperloop=str(schedule.vector_chunks),
        ngpus=str(schedule.world),
        coll=NAMES[collective.kind],
        inplace="0" if collective.kind == "all_to_all" else "1",
    )
    if collective.rooted:
        root.set("root", str(collective.root))
    for rank, operations in enumerate(_operations(schedule)):
        _write_rank(root, schedule, rank, operations)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


@dataclass(slots=True)
class _Operation:
    """One end of a transfer."""

    step: int
    sends: bool
    peer: int
    start: int
    stop: int
    reduce: bool
    block: int = -1
    number: int = -1
    waits: "list[_Operation]" = field(default_factory=list)
    awaited: bool = False

    def after(self, other: "_Operation") -> bool:
        """Return whether it must come after another of the same rank: they share a chunk and one of them writes."""
        return self.start < other.stop and other.start < self.stop and not (self.sends and other.sends)


def _operations(schedule: Schedule) -> list[list[_Operation]]:
    """Return each rank's operations in an order that is right: within a step all are read before any is written."""
    of_rank: list[list[_Operation]] = [[] for _ in range(schedule.world)]
    # Blocks of an all_to_all lie in different buffers, so that each is an operation by itself.
    apart = schedule.collective.kind == "all_to_all"
    most = schedule.chunks // schedule.collective.blocks if apart else schedule.chunks
    for number, step in enumerate(schedule.each_step()):
        for source, destination, start, stop, reduce in zip(*(c.tolist() for c in step.columns), strict=True):
            for begin in (start, *range((start // most + 1) * most, stop, most)):
                end = min(stop, (begin // most + 1) * most)
                of_rank[source].append(_Operation(number, True, destination, begin, end, reduce))
                of_rank[destination].append(_Operation(number, False, source, begin, end, reduce))
    for operations in of_rank:
        operations.sort(key=lambda one: (one.step, not one.sends))  # stable: messages of a pair keep their order
    return of_rank


def _write_rank(root: ElementTree.Element, schedule: Schedule, rank: int, operations: list[_Operation]) -> None:
    collective = schedule.collective
    places = MscclPlaces(collective, schedule.chunks // collective.blocks, collective.kind != "all_to_all")
    blocks = _assign_blocks(operations)
    _find_waits(operations)
    elements: list[ElementTree.Element] = []
    for number, (send, receive) in enumerate(blocks):
        element = ElementTree.Element("tb", id=str(number), send=str(send), recv=str(receive), chan="0")
        steps = 0
        for one in (one for one in operations if one.block == number):
            for wait in one.waits[:-1]:
                _write_step(element, steps, "nop", ("i", -1), ("o", -1), 0, wait, awaited=False)
                steps += 1
            verb = "s" if one.sends else "rrc" if one.reduce else "r"
            here, there = (_place(places, end, one.start) for end in (rank, one.peer))
            source, target = (here, there) if one.sends else (there, here)
            last = one.waits[-1] if one.waits else None
            _write_step(element, steps, verb, source, target, one.stop - one.start, last, awaited=one.awaited)
            steps += 1
        elements.append(element)
    if collective.kind == "all_to_all":  # the rank's own block stays where it is: from the input to the output buffer
        own = rank * places.pieces
        elements.append(ElementTree.Element("tb", id=str(len(blocks)), send="-1", recv="-1", chan="0"))
        _write_step(elements[-1], 0, "cpy", ("i", own), ("o", own), places.pieces, None, awaited=False)
    gpu = ElementTree.SubElement(root, "gpu", {"id": str(rank), **_sizes(places, schedule.chunks)})
    gpu.extend(elements)


def _assign_blocks(operations: list[_Operation]) -> list[tuple[int, int]]:
    """Give every operation its thread block and place there; return the blocks' peers."""
    to = dict.fromkeys(one.peer for one in operations if one.sends)
    sources = dict.fromkeys(one.peer for one in operations if not one.sends)
    if len(to) == len(sources) == 1:
        blocks = [(next(iter(to)), next(iter(sources)))]
        for one in operations:
            one.block = 0
        return blocks
    blocks = [(peer, -1) for peer in to] + [(-1, peer) for peer in sources]
    for one in operations:
        one.block = blocks.index((one.peer, -1) if one.sends else (-1, one.peer))
    return blocks


def _find_waits(operations: list[_Operation]) -> None:
    """Find for each operation the last one of every other block that it must come after, and number the steps."""
    counts: dict[int, int] = {}
    for position, one in enumerate(operations):
        found: dict[int, _Operation] = {}
        for other in reversed(operations[:position]):
            if other.block != one.block and other.block not in found and one.after(other):
                found[other.block] = other
                other.awaited = True
        one.waits = list(found.values())
        one.number = counts.get(one.block, 0) + max(0, len(one.waits) - 1)
        counts[one.block] = one.number + 1


def _place(places: MscclPlaces, rank: int, chunk: int) -> Place:
    """Return where a rank has a chunk: of an all_to_all, one that only passes through is in the scratch buffer."""
    kind = places.collective.kind
    if kind == "all_to_all":
        source, destination = divmod(chunk // places.pieces, places.collective.world)
        if rank not in (source, destination):
            return "s", chunk
        return places.begin(rank, chunk) if rank == source else places.end(rank, chunk)
    return places.end(rank, chunk) if kind == "all_gather" else places.begin(rank, chunk)


def _sizes(places: MscclPlaces, chunks: int) -> dict[str, str]:
    """Return the attributes of the `gpu` element: chunks of the buffers."""
    if places.collective.kind == "all_to_all":
        vector = places.collective.world * places.pieces
        return {"i_chunks": str(vector), "o_chunks": str(vector), "s_chunks": str(chunks)}
    inside, outside = (0, chunks) if places.collective.kind == "all_gather" else (chunks, 0)
    return {"i_chunks": str(inside), "o_chunks": str(outside), "s_chunks": "0"}


def _write_step(
    block: ElementTree.Element,
    number: int,
    verb: str,
    source: Place,
    target: Place,
    count: int,
    wait: _Operation | None,
    *,
    awaited: bool,
) -> None:
    ElementTree.SubElement(
        block,
        "step",
        s=str(number),
        type=verb,
        srcbuf=source[0],
        srcoff=str(source[1]),
        dstbuf=target[0],
        dstoff=str(target[1]),
        cnt=str(count),
        depid=str(wait.block) if wait else "-1",
        deps=str(wait.number) if wait else "-1",
        hasdep=str(int(awaited)),
    )
