"""Runs one endpoint's part of a schedule on real tensors, over whatever can send and receive."""

import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hocket.schedule import Collective, Schedule

from ..transport import CollectiveTimeoutError, CommError, ReduceOperator
from ._program import FINISH, FLUSH, POST, Instruction, Message, compile_schedule

_MOST_BOUND: Final = 64
"""Lengths of vectors for which a part keeps its offsets."""

_MOST_KEPT: Final = 1 << 28
"""Bytes of scratch memory kept from one operation to the next."""


class NotAgreedError(Exception):
    """What `pending.wait` raises when ranks turn out to differ in what they do; `error` says how."""

    def __init__(self, error: CommError) -> None:
        super().__init__(str(error))
        self.error = error


class PendingMessage(Protocol):
    """A message under way."""

    def done(self) -> bool:
        """Return whether `wait` would return at once."""

    def wait(self, timeout_s: float) -> None:
        """Block until the tensor may be used again; raise after `timeout_s`."""


class PointToPoint(Protocol):
    """Sends and receives flat tensors between endpoints; messages from one endpoint to another keep their order."""

    @property
    def name(self) -> str:
        """How reports call it."""

    def send(self, flat: Tensor, peer: int) -> PendingMessage:
        """Begin to send; `flat` stays as it is until the message is done."""

    def receive(self, flat: Tensor, peer: int) -> PendingMessage:
        """Begin to receive into `flat`."""


class Bound(NamedTuple):
    """A program for vectors of one length, in elements."""

    instructions: tuple[Instruction, ...]  # instructions without those for messages that are empty
    place: tuple[slice, ...]  # place of each message, a slice of the buffer
    # place of each message that does not arrive in place, a slice of the staging memory
    staged: tuple[slice | None, ...]
    offsets: tuple[int, ...]  # offset of each chunk in the buffer; one more than there are chunks
    staging: int  # elements of staging memory


def blocks_before(collective: Collective, rank: int) -> list[int]:
    """Return the blocks to which a rank contributes, in order."""
    return np.flatnonzero(collective.before(np.array(rank), np.arange(collective.blocks))).tolist()


def blocks_after(collective: Collective, rank: int) -> list[int]:
    """Return the blocks that a rank holds in the end, in order."""
    return np.flatnonzero(collective.after(np.array(rank), np.arange(collective.blocks))).tolist()


class Scratch:
    """Memory that one operation after another uses: fresh pages cost as much as the reduction that needs them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of any content, good until the next call."""
        nbytes = numel * dtype.itemsize
        if nbytes > _MOST_KEPT:
            return torch.empty(numel, dtype=dtype)
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes].view(dtype)


class EndpointExecutor:
    """What one endpoint does in a schedule: compiled once, and bound once to each length of vector.

    Args:
        schedule: Schedule that it takes part in.
        endpoint: Number of a rank, or of a switch (which holds nothing at first).
        pieces: Number of pieces in which every message is cut, so that one can be sent on while the next comes.

    Raises:
        ScheduleError: chunks that hold something and chunks that do not arrive as one.
    """

    def __init__(self, schedule: Schedule, endpoint: int, *, pieces: int = 1) -> None:
        self.schedule = schedule.part(endpoint).merged().split(pieces)
        self.endpoint = endpoint
        self._program = compile_schedule(self.schedule, endpoint)
        self._bound: OrderedDict[int, Bound] = OrderedDict()

    def numel(self, block_numel: int) -> int:
        """Return the elements of the buffer that this endpoint needs for blocks of so many."""
        return self.bound(block_numel).offsets[-1]

    def block(self, block: int, block_numel: int) -> slice:
        """Return where a block lies in the buffer."""
        pieces = self.schedule.chunks // self.schedule.collective.blocks
        first = int(np.searchsorted(self._program.chunks, block * pieces))
        offsets = self.bound(block_numel).offsets
        return slice(offsets[first], offsets[first + pieces])

    def bound(self, block_numel: int) -> Bound:
        """Return the program for blocks of so many elements (see `Collective.blocks`); kept for the next time."""
        bound = self._bound.get(block_numel)
        if bound is None:
            bound = self._bind(block_numel)
            self._bound[block_numel] = bound
            if len(self._bound) > _MOST_BOUND:
                self._bound.popitem(last=False)
        return bound

    def _bind(self, block_numel: int) -> Bound:
        program = self._program
        pieces = self.schedule.chunks // self.schedule.collective.blocks
        piece = program.chunks % pieces
        sizes = (piece + 1) * block_numel // pieces - piece * block_numel // pieces
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        largest = -(-block_numel // pieces)
        place, staged = [], []
        for message, slot in zip(program.messages, program.staged, strict=True):
            first = int(np.searchsorted(program.chunks, message.start))
            begin, end = int(offsets[first]), int(offsets[first + message.stop - message.start])
            place.append(slice(begin, end))
            staged.append(slice(slot * largest, slot * largest + end - begin) if slot >= 0 else None)
        instructions = tuple(
            instruction
            for instruction in program.instructions
            if place[instruction.messages[0]].start < place[instruction.messages[0]].stop
        )
        return Bound(instructions, tuple(place), tuple(staged), tuple(offsets.tolist()), program.staging * largest)

    def play(
        self,
        buffer: Tensor,
        block_numel: int,
        op: ReduceOperator,
        transport: PointToPoint,
        scratch: Scratch | None = None,
    ) -> Iterator[tuple[PendingMessage, Message]]:
        """Do the part; yield what must be done before it goes on, and go on once it is.

        Args:
            buffer: Buffer, flat, the chunks of this endpoint one after the other; read and written.
            block_numel: Elements of a block.
            op: Operator that combines two contributions.
            transport: Messages to the peers.
            scratch: Memory for staging; a new one if None.
        """
        program, bound = self._program, self.bound(block_numel)
        messages, fresh = program.messages, program.fresh
        staging = (scratch or Scratch()).take(bound.staging, buffer.dtype)
        places = [buffer[place] for place in bound.place]
        arrivals = [
            staging[staged] if staged is not None else place for staged, place in zip(bound.staged, places, strict=True)
        ]
        under_way: list[PendingMessage | None] = [None] * len(messages)
        for code, numbers, own in bound.instructions:
            first = numbers[0]
            if code == POST:
                under_way[first] = transport.receive(arrivals[first], messages[first].peer)
                continue
            if code in (FINISH, FLUSH):
                for number in numbers:
                    pending = under_way[number]
                    assert pending is not None
                    if not pending.done():
                        yield pending, messages[number]
                    under_way[number] = None
                if code == FINISH:
                    _put(places[first], [arrivals[n] for n in numbers], own, messages[first].reduce, fresh[first], op)
                continue
            under_way[first] = transport.send(places[first], messages[first].peer)


def _put(place: Tensor, arrived: list[Tensor], own: int, reduce: bool, fresh: bool, op: ReduceOperator) -> None:
    """Add what has arrived to what is there, in the order of endpoints, or copy it there."""
    if not reduce:
        if arrived[0].data_ptr() != place.data_ptr():
            place.copy_(arrived[0])
        return
    if op.view is not None:
        place, arrived = place.view(op.view), [one.view(op.view) for one in arrived]
    if fresh:
        place.copy_(arrived[0])
        arrived = arrived[1:]
    elif own:
        before = arrived[0]
        for one in arrived[1:own]:
            op.kernel(before, one, out=before)
        op.kernel(before, place, out=place)
        arrived = arrived[own:]
    for one in arrived:
        op.kernel(place, one, out=place)


def perform(
    part: EndpointExecutor,
    buffer: Tensor,
    block_numel: int,
    op: ReduceOperator,
    transport: PointToPoint,
    timeout_s: float,
    scratch: Scratch | None = None,
) -> None:
    """Do a part and block until it is done; for the arguments see `EndpointExecutor.play`.

    Raises:
        CollectiveTimeoutError: a message did not come in time; it says which, and from whom.
        CommError: a peer or the engine failed.
    """
    deadline_s = time.monotonic() + timeout_s
    for pending, message in part.play(buffer, block_numel, op, transport, scratch):
        try:
            pending.wait(max(0.001, deadline_s - time.monotonic()))
        except NotAgreedError:
            raise
        except Exception as error:
            peer = error.peer if isinstance(error, CommError) else message.peer
            if peer is None:
                raise
            where = f"{part.schedule.name} {part.schedule.collective}, step {message.step}: rank {part.endpoint} waits"
            about = f"for chunks {message.start}:{message.stop} from or to rank {message.peer}"
            if isinstance(error, TimeoutError) or time.monotonic() >= deadline_s:
                late = CollectiveTimeoutError(f"{where} {about} and has waited {timeout_s:g} s", (message.peer,))
                late.peer = peer
                raise late from error
            failure = CommError(f"{where} {about}, and {transport.name} failed: {error}")
            failure.peer = peer
            raise failure from error
