"""Compiles a schedule into what one endpoint does: a flat list of posts, sends, waits and reductions.

It is done once for each (schedule, endpoint) and kept; what is left for run time is one pass over the list. The rules:

- a send waits for the receives of earlier steps that touch its chunks, and for nothing else;
- what arrives to be added goes to a place of its own, so that it can be posted before it is needed (a *lookahead* of
  some steps), and is added in a fixed order: by endpoint within a step, this endpoint's own value in its place, so that
  one-shot algorithms give all ranks the same bits;
- what arrives to be copied goes straight into place, once nothing that is there is needed any more; if the same step
  also sends it (an exchange), it goes to a place of its own first.

No order of the messages can block: a step waits for nothing but earlier steps of its peers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.schedule import Schedule, ScheduleError

LOOKAHEAD: Final = 2
"""Steps whose receives are posted ahead. Each costs memory for what it adds; two hide the hand-shake of an engine."""

POST, SEND, FINISH, FLUSH = range(4)


class Message(NamedTuple):
    """Chunks that travel between this endpoint and a peer in one piece."""

    step: int
    peer: int
    start: int
    stop: int
    reduce: bool

    def touches(self, other: "Message") -> bool:
        """Return whether the two share a chunk."""
        return self.start < other.stop and other.start < self.stop


class Instruction(NamedTuple):
    """One thing to do."""

    code: int  # POST a receive, SEND, FINISH some receives (wait and put in place), FLUSH a send (wait)
    messages: tuple[int, ...]  # numbers of the messages it is about; several only for FINISH, in the order of adding
    own: int = 0  # number of them that come before this endpoint's own value, for FINISH of several


@dataclass(frozen=True, slots=True)
class Program:
    """What one endpoint does, in chunks."""

    messages: tuple[Message, ...]  # all messages of this endpoint
    instructions: tuple[Instruction, ...]  # instructions in order
    staged: tuple[int, ...]  # chunk of the staging memory where each message arrives; -1 for one that arrives in place
    fresh: tuple[bool, ...]  # whether nothing was there before each received message, so that adding is copying
    # chunks of the schedule that this endpoint has memory for, in order; offsets count in these
    chunks: NDArray[np.int64]
    staging: int  # chunks of staging memory


def compile_schedule(schedule: Schedule, endpoint: int) -> Program:
    """Compile the part of a schedule that one endpoint plays; see the head of this module.

    Raises:
        ScheduleError: chunks that hold something and chunks that do not arrive as one.
    """
    sends, receives = _messages(schedule, endpoint)
    chunks = _held_chunks(schedule, endpoint, [*sends, *receives])
    return _Compiler(schedule, endpoint, sends, receives, chunks).run()


def _messages(schedule: Schedule, endpoint: int) -> tuple[list[Message], list[Message]]:
    """Return what this endpoint sends and receives, in the order in which both ends of each message know it."""
    sends: list[Message] = []
    receives: list[Message] = []
    for number, step in enumerate(schedule.part(endpoint).each_step()):
        for source, destination, start, stop, reduce in zip(*(c.tolist() for c in step.columns), strict=True):
            if source == endpoint:
                sends.append(Message(number, destination, start, stop, reduce))
            else:
                receives.append(Message(number, source, start, stop, reduce))
    return sends, receives


def _held_chunks(schedule: Schedule, endpoint: int, messages: Iterable[Message]) -> NDArray[np.int64]:
    """Return the chunks that this endpoint holds before, after or in between."""
    collective = schedule.collective
    touched = np.zeros(schedule.chunks, np.bool_)
    if endpoint < schedule.world:
        block = np.arange(schedule.chunks) // (schedule.chunks // collective.blocks)
        rank = np.array(endpoint)
        touched |= collective.before(rank, block) | collective.after(rank, block)
        if collective.blocks == 1:
            touched[:] = True  # the vector is the caller's own, and is not cut
    for message in messages:
        touched[message.start : message.stop] = True
    return np.flatnonzero(touched)


class _Compiler:
    """Emits the instructions of one endpoint, step by step."""

    def __init__(
        self,
        schedule: Schedule,
        endpoint: int,
        sends: list[Message],
        receives: list[Message],
        chunks: NDArray[np.int64],
    ) -> None:
        self._name = schedule.name
        self._endpoint = endpoint
        self._chunks = chunks
        self._messages = [*sends, *receives]
        self._sends = list(range(len(sends)))
        self._receives = list(range(len(sends), len(self._messages)))
        self._exchanged = self._find_exchanges()
        self._instructions: list[Instruction] = []
        self._unposted = list(self._receives)
        self._unfinished: list[int] = []
        self._unsent = list(self._sends)
        self._unflushed: list[int] = []
        self._staged = [-1] * len(self._messages)
        self._fresh = [False] * len(self._messages)
        self._free = _StagingSpace()
        self._empty = self._empty_at_first(schedule)

    def _empty_at_first(self, schedule: Schedule) -> NDArray[np.bool_]:
        """Return which chunks hold nothing when the operation begins."""
        if self._endpoint >= schedule.world:
            return np.ones(schedule.chunks, np.bool_)
        block = np.arange(schedule.chunks) // (schedule.chunks // schedule.collective.blocks)
        return np.array(~schedule.collective.before(np.array(self._endpoint), block))

    def _find_exchanges(self) -> set[int]:
        """Find the receives into chunks that the same step also sends."""
        by_step: dict[int, list[Message]] = {}
        for number in self._sends:
            by_step.setdefault(self._messages[number].step, []).append(self._messages[number])
        return {
            number
            for number in self._receives
            if any(self._messages[number].touches(sent) for sent in by_step.get(self._messages[number].step, ()))
        }

    def run(self) -> Program:
        for step in sorted({message.step for message in self._messages}):
            self._post(step)
            while self._unsent and self._messages[self._unsent[0]].step == step:
                number = self._unsent.pop(0)
                self._finish_before(self._messages[number])
                self._emit(SEND, number)
                self._unflushed.append(number)
        while self._unfinished:
            self._finish(self._unfinished[0])
        for number in self._unflushed:
            self._emit(FLUSH, number)
        return Program(
            tuple(self._messages),
            tuple(self._instructions),
            tuple(self._staged),
            tuple(self._fresh),
            self._chunks,
            self._free.most,
        )

    def _post(self, step: int) -> None:
        """Post the receives of this step, and those of the next ones that may already be."""
        held_back: set[int] = set()  # peers: messages of one peer arrive in order, so they are posted in order
        for number in list(self._unposted):
            message = self._messages[number]
            if message.step > step + LOOKAHEAD:
                break
            staged = message.reduce or number in self._exchanged
            if message.peer in held_back or (not staged and message.step > step and self._is_needed(message)):
                held_back.add(message.peer)
                continue
            if staged:
                self._staged[number] = self._free.take(message.stop - message.start)
            else:
                self._finish_before(message)
                self._flush_before(message)
            self._unposted.remove(number)
            self._unfinished.append(number)
            self._emit(POST, number)

    def _is_needed(self, message: Message) -> bool:
        """Return whether the chunks of a later message are still in use, so that it cannot be received in place yet."""
        earlier = [*self._unfinished, *(n for n in self._unposted if self._messages[n].step < message.step)]
        coming = (n for n in self._unsent if self._messages[n].step <= message.step)
        return any(self._messages[n].touches(message) for n in (*earlier, *coming))

    def _finish_before(self, message: Message) -> None:
        """Put in place what earlier steps have received of these chunks."""
        for number in list(self._unfinished):
            other = self._messages[number]
            if number in self._unfinished and other.step < message.step and other.touches(message):
                self._finish(number)

    def _finish(self, number: int) -> None:
        """Put a received message in place, after all that must be there before it."""
        message = self._messages[number]
        self._finish_before(message)
        for other in list(self._unfinished):  # of one step, in the order of the schedule, those with the same chunks
            if other == number:
                break
            before = self._messages[other]
            if before.step == message.step and before.touches(message) and not self._same(other, number):
                self._finish(other)
        together = [n for n in self._unfinished if n == number or self._same(n, number)]
        together.sort(key=lambda n: self._messages[n].peer)
        if self._staged[number] >= 0:
            self._flush_before(message)
        empty = self._empty[message.start : message.stop]
        held = not empty[0]
        if (empty == held).any():
            raise ScheduleError(
                f"{self._name}, step {message.step}: chunks {message.start}:{message.stop} arrive at endpoint "
                f"{self._endpoint} where some are there already and some are not; send the two kinds apart"
            )
        own = sum(self._messages[n].peer < self._endpoint for n in together) if held else 0
        if message.reduce:
            self._fresh[together[0]] = not held
        empty[:] = False
        self._instructions.append(Instruction(FINISH, tuple(together), own))
        for done in together:
            self._unfinished.remove(done)
            if self._staged[done] >= 0:
                self._free.give(self._staged[done], message.stop - message.start)

    def _same(self, one: int, other: int) -> bool:
        """Return whether two messages are added to the same chunks in the same step."""
        a, b = self._messages[one], self._messages[other]
        return a.reduce and b.reduce and (a.step, a.start, a.stop) == (b.step, b.start, b.stop)

    def _flush_before(self, message: Message) -> None:
        """Wait for sends that still read these chunks."""
        for number in list(self._unflushed):
            if self._messages[number].touches(message):
                self._emit(FLUSH, number)
                self._unflushed.remove(number)

    def _emit(self, code: int, number: int) -> None:
        self._instructions.append(Instruction(code, (number,)))


class _StagingSpace:
    """Staging memory, in chunks: first fit."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []
        self.most = 0

    def take(self, length: int) -> int:
        start = 0
        for begin, end in self._taken:
            if begin - start >= length:
                break
            start = end
        self._taken.append((start, start + length))
        self._taken.sort()
        self.most = max(self.most, start + length)
        return start

    def give(self, start: int, length: int) -> None:
        self._taken.remove((start, start + length))
