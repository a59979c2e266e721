"""Reads MSCCL XML, the classic form: programs of thread blocks, matched, ordered and made transfers.

A program can be wrong where a schedule cannot: a receive may have no send, blocks may wait for each other in a circle,
and two operations may touch one chunk with nothing that orders them. Each is an error here, with the place. What is
left is read as a schedule: MSCCL's buffers become the one room of a rank, and operations get the earliest steps that
keep their order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final
from xml.etree import ElementTree

import numpy as np

from ._collective import Collective, ScheduleError
from ._ir import Schedule, Step
from ._msccl_write import NAMES

_KINDS: Final = {name: kind for kind, name in NAMES.items()} | {"reducescatter": "reduce_scatter"}
_RECEIVES: Final = {"r", "rcs", "rrs", "rrc", "rrcs"}
_SENDS: Final = {"s", "rcs", "rrs", "rrcs"}
_REDUCES: Final = {"rrs", "rrc", "rrcs", "re"}
_LOCAL: Final = {"cpy", "re", "nop"}

Place = tuple[str, int]


@dataclass(slots=True)
class _Operation:
    """One `step` element."""

    gpu: int
    block: int
    number: int
    verb: str
    source: Place
    target: Place
    count: int
    wait: tuple[int, int] | None
    order: int = -1
    clock: dict[tuple[int, int], int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"gpu {self.gpu}, tb {self.block}, step {self.number} ({self.verb})"


@dataclass(slots=True)
class _Message:
    """A transfer under construction: read by one operation, written by another."""

    source: int
    destination: int
    start: int
    stop: int
    reduce: bool
    read: _Operation
    written: _Operation


def from_msccl(text: str) -> Schedule:
    """Reads MSCCL XML.

    Args:
        text: of an `algo` element in the classic form; scratch buffers may hold chunks that are passed on or reduced.

    Raises:
        ScheduleError: no such XML, a receive without a send, waits in a circle, chunks touched in no order, or a
            rank that needs two values of one chunk at once, which schedules do not have.
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ScheduleError(f"no XML: {error}") from None
    name, coll = _text(root, "name"), _text(root, "coll")
    if root.tag != "algo" or coll not in _KINDS:
        raise ScheduleError(f"algo {name!r}: coll {coll!r} is none of {', '.join(_KINDS)}")
    collective = Collective(_KINDS[coll], _number(root, "ngpus"), int(root.get("root", "0")))
    chunks = _chunks(root, collective)
    programs, peers = _programs(root, collective.world)
    ordered, sent = _run(programs, peers)
    messages = _Rooms(collective, chunks, root.get("inplace") == "1").follow(ordered, sent)
    return Schedule("".join(c if c.isalnum() or c in "_." else "-" for c in name), collective, chunks, _steps(messages))


def _programs(
    root: ElementTree.Element, world: int
) -> tuple[dict[tuple[int, int], list[_Operation]], dict[tuple[int, int], tuple[int, int, int]]]:
    """The operations of each (gpu, thread block), and its peers and channel."""
    programs: dict[tuple[int, int], list[_Operation]] = {}
    peers: dict[tuple[int, int], tuple[int, int, int]] = {}
    for gpu in root.iter("gpu"):
        rank = _number(gpu, "id")
        if not 0 <= rank < world:
            raise ScheduleError(f"gpu {rank}: ngpus={world}, so ids are 0 to {world - 1}")
        for block in gpu.iter("tb"):
            key = rank, _number(block, "id")
            peers[key] = _number(block, "send"), _number(block, "recv"), int(block.get("chan", "0"))
            programs[key] = [_operation(key, place, step) for place, step in enumerate(block.iter("step"))]
    return programs, peers


def _operation(key: tuple[int, int], place: int, step: ElementTree.Element) -> _Operation:
    verb = _text(step, "type")
    one = _Operation(
        *key,
        _number(step, "s"),
        verb,
        (_text(step, "srcbuf"), _number(step, "srcoff")),
        (_text(step, "dstbuf"), _number(step, "dstoff")),
        _number(step, "cnt"),
        (_number(step, "depid"), _number(step, "deps")) if _number(step, "depid") >= 0 else None,
    )
    if verb not in _RECEIVES | _SENDS | _LOCAL:
        raise ScheduleError(f"{one}: the type {verb!r} is unknown")
    if one.number != place:
        raise ScheduleError(f"{one}: it stands at place {place}; steps are numbered from 0 in their order")
    return one


def _run(
    programs: dict[tuple[int, int], list[_Operation]], peers: dict[tuple[int, int], tuple[int, int, int]]
) -> tuple[list[_Operation], dict[int, _Operation]]:
    """Lets all blocks go on as far as they can until all are done.

    Every operation gets a vector clock: how far it knows each block of its own gpu to be.

    Returns:
        The operations in an order in which they can happen, and for each receive (by its place in that order) its send.
    """
    lanes: dict[tuple[int, int, int], deque[_Operation]] = {}
    done: list[_Operation] = []
    sent: dict[int, _Operation] = {}
    progress = dict.fromkeys(programs, 0)
    moved = True
    while moved:
        moved = False
        for key, program in programs.items():
            while progress[key] < len(program):
                one = program[progress[key]]
                send, receive, channel = peers[key]
                lane = lanes.setdefault((receive, one.gpu, channel), deque()) if one.verb in _RECEIVES else None
                if one.wait is not None and progress.get((one.gpu, one.wait[0]), 0) <= one.wait[1]:
                    break
                if lane is not None and not lane:
                    break
                one.order = len(done)
                clocks = [program[progress[key] - 1].clock] if progress[key] else []
                if one.wait is not None:
                    clocks.append(programs[one.gpu, one.wait[0]][one.wait[1]].clock)
                if lane is not None:
                    sent[one.order] = lane.popleft()
                    clocks.append(sent[one.order].clock)
                    if sent[one.order].count != one.count:
                        raise ScheduleError(f"{one}: takes {one.count} chunks of {sent[one.order]}, which sends others")
                for clock in clocks:
                    for block, at in clock.items():
                        one.clock[block] = max(at, one.clock.get(block, -1))
                one.clock[key] = one.number
                if one.verb in _SENDS:
                    lanes.setdefault((one.gpu, send, channel), deque()).append(one)
                done.append(one)
                progress[key] += 1
                moved = True
    stuck = [program[progress[key]] for key, program in programs.items() if progress[key] < len(program)]
    if stuck:
        waits = "; ".join(f"{one} waits {_for_what(one, peers)}" for one in stuck[:4])
        raise ScheduleError(f"the program does not end: {waits}")
    unread = [one for lane in lanes.values() for one in lane]
    if unread:
        raise ScheduleError(f"{unread[0]}: nobody receives what it sends")
    return done, sent


def _for_what(one: _Operation, peers: dict[tuple[int, int], tuple[int, int, int]]) -> str:
    if one.verb in _RECEIVES:
        return f"for gpu {peers[one.gpu, one.block][1]}"
    return f"for tb {one.wait[0]}, step {one.wait[1]}" if one.wait else "for nothing"


class _Rooms:
    """Follows which chunk lies where, and which values are the latest, to make messages of operations."""

    def __init__(self, collective: Collective, chunks: int, in_place: bool) -> None:
        self._collective = collective
        self._chunks = chunks
        self._pieces = chunks // collective.blocks
        self._in_place = in_place
        self._held: dict[tuple[int, Place], int] = {}  # (gpu, place) -> chunk
        self._current: dict[tuple[int, int], set[Place]] = {}  # (gpu, chunk) -> places with its latest value
        self._parked: dict[tuple[int, Place], _Message] = {}  # arrived in scratch, not yet reduced
        self._touches: dict[tuple[int, int], list[tuple[_Operation, bool]]] = {}  # who read (False) or wrote a chunk
        for gpu in range(collective.world):
            for chunk in range(chunks):
                block = np.array(chunk // self._pieces)
                if collective.before(np.array(gpu), block):
                    self._current[gpu, chunk] = {self._home(gpu, chunk)}
                    self._held[gpu, self._home(gpu, chunk)] = chunk

    def _home(self, gpu: int, chunk: int) -> Place:
        """Where a rank has a chunk in the beginning."""
        block, piece = divmod(chunk, self._pieces)
        if self._collective.kind == "all_to_all":
            return "i", block % self._collective.world * self._pieces + piece
        return self._same(gpu, ("i", piece)) if self._collective.kind == "all_gather" else ("i", chunk)

    def _same(self, gpu: int, place: Place) -> Place:
        """One name for a place that has two, because input and output share memory."""
        buffer, offset = place
        if not self._in_place:
            return place
        if self._collective.kind == "all_gather" and buffer == "i":
            return "o", gpu * self._pieces + offset
        if self._collective.kind == "reduce_scatter" and buffer == "o":
            return "i", gpu * self._pieces + offset
        return ("i", offset) if self._collective.kind != "all_gather" and buffer == "o" else place

    def follow(self, ordered: list[_Operation], sent: dict[int, _Operation]) -> list[tuple[_Message, int]]:
        """The messages, one a chunk, with the numbers that order them; see `_steps`."""
        messages: list[_Message] = []
        carried: dict[tuple[int, int], int] = {}  # (order of a send, offset) -> chunk
        for one in ordered:
            for k in range(one.count):
                source = self._same(one.gpu, (one.source[0], one.source[1] + k))
                target = self._same(one.gpu, (one.target[0], one.target[1] + k))
                if one.verb in _RECEIVES:
                    sender = sent[one.order]
                    chunk = carried[sender.order, k]
                    reduce = one.verb in _REDUCES
                    messages.append(_Message(sender.gpu, one.gpu, chunk, chunk + 1, reduce, sender, one))
                    self._arrive(one, messages[-1], target)
                elif one.verb in _LOCAL and one.verb != "nop":
                    self._local(one, source, target)
                if one.verb in _SENDS:
                    place = target if one.verb in _RECEIVES else source
                    carried[one.order, k] = self._read(one, place)
        for (_, place), message in self._parked.items():
            raise ScheduleError(f"{message.written}: what arrives in {place[0]}[{place[1]}] is never used")
        self._check_order()
        return _ordered(messages, self._touches)

    def _arrive(self, one: _Operation, message: _Message, place: Place) -> None:
        gpu, chunk = one.gpu, message.start
        there = self._current.get((gpu, chunk))
        if there and place not in there and not message.reduce and place[0] == "s":
            self._parked[gpu, place] = message  # the rank has a value of its own; this one is to be reduced into it
            return
        self._held[gpu, place] = chunk
        self._current[gpu, chunk] = {place}
        self._touch(one, chunk, writes=True)

    def _local(self, one: _Operation, source: Place, target: Place) -> None:
        parked = self._parked.pop((one.gpu, source), None)
        if parked is not None:
            parked.reduce = one.verb == "re"
            parked.written = one
            self._held[one.gpu, target] = parked.start
            self._current[one.gpu, parked.start] = {target}
            self._touch(one, parked.start, writes=True)
            return
        if one.verb == "re":
            raise ScheduleError(f"{one}: reduces {source[0]}[{source[1]}], which has not just arrived from a peer")
        chunk = self._read(one, source)
        self._held[one.gpu, target] = chunk
        self._current[one.gpu, chunk].add(target)

    def _read(self, one: _Operation, place: Place) -> int:
        chunk = self._held.get((one.gpu, place))
        if chunk is None or place not in self._current.get((one.gpu, chunk), ()):
            raise ScheduleError(
                f"{one}: reads {place[0]}[{place[1]}], which holds nothing, or a value that the rank has replaced "
                "elsewhere; a schedule has one value of a chunk at each rank"
            )
        self._touch(one, chunk, writes=False)
        return chunk

    def _touch(self, one: _Operation, chunk: int, *, writes: bool) -> None:
        self._touches.setdefault((one.gpu, chunk), []).append((one, writes))

    def _check_order(self) -> None:
        """Raises if two operations touch a chunk, one of them writes, and nothing says which comes first."""
        for (_, chunk), touches in self._touches.items():
            for position, (later, writes) in enumerate(touches):
                for earlier, wrote in touches[:position]:
                    known = later.clock.get((earlier.gpu, earlier.block), -1)
                    if (writes or wrote) and known < earlier.number:
                        raise ScheduleError(f"{later} and {earlier} both touch chunk {chunk} with nothing between them")


def _ordered(
    messages: list[_Message], touches: dict[tuple[int, int], list[tuple[_Operation, bool]]]
) -> list[tuple[_Message, int]]:
    """Gives each message the earliest step that keeps the order of what touches each chunk at each rank."""
    reads: dict[tuple[int, int, int], list[int]] = {}
    writes: dict[tuple[int, int, int], list[int]] = {}
    for number, message in enumerate(messages):
        reads.setdefault((message.source, message.start, message.read.order), []).append(number)
        writes.setdefault((message.destination, message.start, message.written.order), []).append(number)
    edges: list[tuple[int, int, int]] = []  # from, to, at least so many steps later
    for (gpu, chunk), row in touches.items():
        events = [
            (number, wrote)
            for one, wrote in row
            for number in (writes if wrote else reads).get((gpu, chunk, one.order), ())
        ]
        for position, (later, later_writes) in enumerate(events):
            for earlier, earlier_wrote in events[:position]:
                if later == earlier or not (later_writes or earlier_wrote):
                    continue
                both_add = later_writes and messages[later].reduce and messages[earlier].reduce
                edges.append((earlier, later, int(earlier_wrote and not both_add)))
    steps = [0] * len(messages)
    for _ in range(len(messages) + 1):
        changed = False
        for before, after, gap in edges:
            if steps[after] < steps[before] + gap:
                steps[after] = steps[before] + gap
                changed = True
        if not changed:
            return list(zip(messages, steps, strict=True))
    raise ScheduleError(
        "the order of its operations cannot be expressed in steps: a send reads long before it is received"
    )


def _steps(messages: list[tuple[_Message, int]]) -> tuple[Step, ...]:
    steps = []
    for number in sorted({step for _, step in messages}):
        rows = [message for message, step in messages if step == number]
        merged: list[_Message] = []
        for message in sorted(rows, key=lambda m: (m.source, m.destination, m.reduce, m.start)):
            last = merged[-1] if merged else None
            if last and (last.source, last.destination, last.reduce, last.stop) == (
                message.source, message.destination, message.reduce, message.start
            ):  # fmt: skip
                last.stop = message.stop
            else:
                merged.append(message)
        steps.append(
            Step.of(
                [m.source for m in merged],
                [m.destination for m in merged],
                [m.start for m in merged],
                [m.stop for m in merged],
                reduce=[m.reduce for m in merged],
            )
        )
    return tuple(steps)


def _chunks(root: ElementTree.Element, collective: Collective) -> int:
    """Chunks of the whole row, from `nchunksperloop` or the buffers' sizes."""
    vector = int(root.get("nchunksperloop", "0"))
    if not vector:
        vector = max(max(int(gpu.get("i_chunks", "0")), int(gpu.get("o_chunks", "0"))) for gpu in root.iter("gpu"))
    return vector * collective.blocks // collective.vector_blocks


def _text(element: ElementTree.Element, name: str) -> str:
    value = element.get(name)
    if value is None:
        raise ScheduleError(f"<{element.tag}> {dict(element.attrib)}: the attribute {name!r} is missing")
    return value


def _number(element: ElementTree.Element, name: str) -> int:
    value = _text(element, name)
    try:
        return int(value)
    except ValueError:
        raise ScheduleError(f"<{element.tag}> {dict(element.attrib)}: {name}={value!r} is no whole number") from None
