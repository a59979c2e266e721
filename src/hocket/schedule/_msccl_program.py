"""An MSCCL program: what each thread block of each GPU does in turn, and an order in which it can all happen."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final
from xml.etree import ElementTree

from ._collective import Collective, ScheduleError

RECEIVES: Final = {"r", "rcs", "rrs", "rrc", "rrcs"}
SENDS: Final = {"s", "rcs", "rrs", "rrcs"}
REDUCES: Final = {"rrs", "rrc", "rrcs", "re"}
LOCAL: Final = {"cpy", "re", "nop"}

Place = tuple[str, int]
"""A buffer and an offset in it."""


@dataclass(slots=True)
class MscclOperation:
    """One `step` element."""

    gpu: int
    block: int
    number: int
    verb: str
    source: Place
    target: Place
    count: int
    wait: tuple[int, int] | None
    awaited: bool
    order: int = -1
    clock: dict[tuple[int, int], int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"gpu {self.gpu}, tb {self.block}, step {self.number} ({self.verb})"


@dataclass(slots=True)
class ThreadBlock:
    """One `tb` element: the peers of a thread block, the channel to them, and how much of its work is done."""

    send: int
    receive: int
    channel: int
    operations: list[MscclOperation]
    done: int = 0

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do."""
        return self.done == len(self.operations)


Blocks = dict[tuple[int, int], ThreadBlock]
"""Thread blocks by (gpu, number)."""


@dataclass(frozen=True, slots=True)
class MscclPlaces:
    """Where the chunks of a collective lie in MSCCL's buffers."""

    collective: Collective
    pieces: int  # chunks of a block
    in_place: bool  # whether input and output share memory

    def begin(self, rank: int, chunk: int) -> Place:
        """Return where a rank has a chunk of its input."""
        block, piece = divmod(chunk, self.pieces)
        kind = self.collective.kind
        if kind == "all_to_all":
            return self.one_name(rank, ("i", block % self.collective.world * self.pieces + piece))
        return self.one_name(rank, ("i", piece if kind == "all_gather" else chunk))

    def end(self, rank: int, chunk: int) -> Place:
        """Return where a rank must have a chunk of the result."""
        block, piece = divmod(chunk, self.pieces)
        kind = self.collective.kind
        if kind == "all_to_all":
            return self.one_name(rank, ("o", block // self.collective.world * self.pieces + piece))
        return self.one_name(rank, ("o", piece if kind == "reduce_scatter" else chunk))

    def one_name(self, rank: int, place: Place) -> Place:
        """Return one name for a place that has two because input and output share memory."""
        buffer, offset = place
        if not self.in_place or buffer == "s":
            return place
        if self.collective.kind == "all_gather":
            return ("o", rank * self.pieces + offset) if buffer == "i" else place
        if self.collective.kind == "reduce_scatter":
            return ("i", rank * self.pieces + offset) if buffer == "o" else place
        return "i", offset


def blocks_of(root: ElementTree.Element, world: int) -> Blocks:
    """Return all thread blocks of a program.

    Raises:
        ScheduleError: GPUs that are not those of the world, an unknown type of step, steps in another order, or a
            channel that is not there.
    """
    blocks: Blocks = {}
    channels = number_of(root, "nchannels", 0)
    ranks = [number_of(gpu, "id") for gpu in root.iter("gpu")]
    if sorted(ranks) != list(range(min(world, len(ranks) + 1))):
        raise ScheduleError(f"ngpus={world}, so each id from 0 to {world - 1} must stand once, and not {ranks[:8]}")
    for rank, gpu in zip(ranks, root.iter("gpu"), strict=True):
        for block in gpu.iter("tb"):
            key = rank, number_of(block, "id")
            if key in blocks:
                raise ScheduleError(f"gpu {rank}: there are two thread blocks {key[1]}; give each its own id")
            operations = [_operation(key, place, step) for place, step in enumerate(block.iter("step"))]
            channel = number_of(block, "chan", 0)
            if channels and not 0 <= channel < channels:
                raise ScheduleError(
                    f"gpu {rank}, tb {key[1]}: chan={channel}; with nchannels={channels} they are 0 to {channels - 1}"
                )
            blocks[key] = ThreadBlock(number_of(block, "send"), number_of(block, "recv"), channel, operations)
    return blocks


def _operation(key: tuple[int, int], place: int, step: ElementTree.Element) -> MscclOperation:
    verb = text_of(step, "type")
    one = MscclOperation(
        *key,
        number_of(step, "s"),
        verb,
        (text_of(step, "srcbuf"), number_of(step, "srcoff")),
        (text_of(step, "dstbuf"), number_of(step, "dstoff")),
        number_of(step, "cnt"),
        (number_of(step, "depid"), number_of(step, "deps")) if number_of(step, "depid") >= 0 else None,
        number_of(step, "hasdep", 1) != 0,
    )
    if verb not in RECEIVES | SENDS | LOCAL:
        raise ScheduleError(f"{one}: the type {verb!r} is unknown")
    if one.wait is not None and one.wait[1] < 0:
        raise ScheduleError(f"{one}: waits for step {one.wait[1]} of tb {one.wait[0]}; steps are numbered from 0")
    if one.number != place:
        raise ScheduleError(f"{one}: it stands at place {place}; steps are numbered from 0 in their order")
    return one


def run(blocks: Blocks) -> tuple[list[MscclOperation], dict[int, MscclOperation]]:
    """Let all blocks go on as far as they can until all are done.

    Every operation gets a vector clock: how far it knows each block of its own gpu to be.

    Returns:
        The operations in an order in which they can happen, and for each receive (by its place in that order) its send.

    Raises:
        ScheduleError: blocks wait for each other in a circle, a receive takes less or more than its send gives, or a
            send has no receive.
    """
    lanes: dict[tuple[int, int, int], deque[MscclOperation]] = {}  # (sender, receiver, channel) -> sends under way
    ordered: list[MscclOperation] = []
    sent: dict[int, MscclOperation] = {}
    moved = True
    while moved:
        moved = False
        for key, block in blocks.items():
            while not block.ended:
                one = block.operations[block.done]
                clocks = [block.operations[block.done - 1].clock] if block.done else []
                if one.wait is not None:
                    other = blocks.get((one.gpu, one.wait[0]))
                    if other is None or other.done <= one.wait[1]:
                        break
                    if not other.operations[one.wait[1]].awaited:
                        raise ScheduleError(f"{one}: waits for {other.operations[one.wait[1]]}, which says hasdep=0")
                    clocks.append(other.operations[one.wait[1]].clock)
                if one.verb in RECEIVES:
                    lane = lanes.get((block.receive, one.gpu, block.channel))
                    if not lane:
                        break
                    send = sent[len(ordered)] = lane.popleft()
                    clocks.append(send.clock)
                    if send.count != one.count:
                        raise ScheduleError(f"{one}: takes {one.count} chunks of {send}, which sends others")
                for clock in clocks:
                    for number, at in clock.items():
                        one.clock[number] = max(at, one.clock.get(number, -1))
                one.clock[key] = one.number
                one.order = len(ordered)
                if one.verb in SENDS:
                    lanes.setdefault((one.gpu, block.send, block.channel), deque()).append(one)
                ordered.append(one)
                block.done += 1
                moved = True
    stuck = [block for block in blocks.values() if not block.ended]
    if stuck:
        waits = "; ".join(_stuck(block) for block in stuck[:4])
        raise ScheduleError(f"the program does not end: {waits}")
    unread = [one for lane in lanes.values() for one in lane]
    if unread:
        raise ScheduleError(f"{unread[0]}: nobody receives what it sends")
    return ordered, sent


def _stuck(block: ThreadBlock) -> str:
    one = block.operations[block.done]
    if one.verb in RECEIVES:
        return f"{one} waits for gpu {block.receive}"
    return f"{one} waits for tb {one.wait[0]}, step {one.wait[1]}" if one.wait else f"{one} waits for nothing"


def text_of(element: ElementTree.Element, name: str) -> str:
    """Return an attribute that must be there."""
    value = element.get(name)
    if value is None:
        raise ScheduleError(f"<{element.tag}> {dict(element.attrib)}: the attribute {name!r} is missing")
    return value


def number_of(element: ElementTree.Element, name: str, default: int | None = None) -> int:
    """Return a whole number, which must be there if there is no default."""
    value = text_of(element, name) if default is None else element.get(name, str(default))
    try:
        return int(value)
    except ValueError:
        raise ScheduleError(f"<{element.tag}> {dict(element.attrib)}: {name}={value!r} is no whole number") from None
