"""Point-to-point inside a host: a stream of bytes from every rank to every other, through shared memory.

Each rank owns an inbox with a ring of bytes for every sender. A sender writes bytes, then its count of bytes produced;
the receiver reads that count, then the bytes, then writes its count of bytes consumed. Who changes a count wakes the
other side if it sleeps. Nothing moves by itself: a rank that waits for one message moves all of its messages, so two
ranks that send each other more than a ring holds do not block each other. Messages carry no head: both sides know from
the schedule what comes next. For the fence between bytes and counts see `_kernel`.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch

from . import _kernel
from ._errors import CollectiveTimeoutError, PeerDiedError
from ._segment import PAGE, Address, Segment, host_identity

LANE_NBYTES: Final = 1 << 19  # a message of this size is on its way before its receiver has come; fits in the L2 cache
_LINE: Final = 16  # words of 4 bytes
_BELL, _ASLEEP = 0, _LINE  # in the inbox's first page
_PRODUCED, _CONSUMED = 0, _LINE  # in a lane's head
_HEAD_NBYTES: Final = 2 * 4 * _LINE
_WORD: Final = 0xFFFFFFFF
_SPINS: Final = 20
_SLICE_S: Final = 0.1


class Mailbox:
    """This rank's inbox and its ways into those of its peers; a `PointToPoint`.

    Args:
        rank: this rank.
        inboxes: everyone's, this rank's own included.
        pids: of everyone.
    """

    name = "shared memory"

    def __init__(self, rank: int, inboxes: Sequence[Segment], pids: Sequence[int]) -> None:
        self.rank = rank
        self._inboxes = list(inboxes)
        self._bells = [inbox.view[:PAGE].cast("I") for inbox in inboxes]
        self._out = [None if r == rank else _Lane(self, inbox, rank, r) for r, inbox in enumerate(inboxes)]
        self._in = [None if r == rank else _Lane(self, inboxes[rank], r, r) for r in range(len(inboxes))]
        self._busy: list[Message] = []
        self._poll = select.poll()
        self._ranks_by_fd = {}
        for r, pid in enumerate(pids):
            if r != rank:
                fd = os.pidfd_open(pid)
                self._ranks_by_fd[fd] = r
                self._poll.register(fd, select.POLLIN)

    def send(self, flat: torch.Tensor, peer: int) -> Message:
        """See PointToPoint; what fits in the ring is copied at once."""
        lane = self._out[peer]
        assert lane is not None
        return self._begin(Message(self, lane, flat.view(torch.uint8), sending=True))

    def receive(self, flat: torch.Tensor, peer: int) -> Message:
        """See PointToPoint."""
        lane = self._in[peer]
        assert lane is not None
        return self._begin(Message(self, lane, flat.view(torch.uint8), sending=False))

    def _begin(self, message: Message) -> Message:
        message.lane.queue.append(message)
        self._busy.append(message)
        message.lane.advance()
        return message

    def advance(self) -> bool:
        """Moves whatever can move; says whether anything did."""
        moved = False
        for message in self._busy:
            if message.lane.advance():
                moved = True
        if moved:
            self._busy = [message for message in self._busy if message.left]
        return moved

    def ring(self, peer: int) -> None:
        """Tells a peer that a count has changed. See `_sleep` for why it cannot miss it."""
        _kernel.full_fence()
        bell = self._bells[peer]
        bell[_BELL] = (bell[_BELL] + 1) & _WORD
        _kernel.full_fence()
        if bell[_ASLEEP]:
            _kernel.futex_wake(self._inboxes[peer].base + 4 * _BELL)

    def wait(self, message: Message, timeout_s: float) -> None:
        """Moves messages until one is done.

        Raises:
            CollectiveTimeoutError: it was not within `timeout_s`.
            PeerDiedError: its peer has died.
        """
        deadline_s = time.monotonic() + timeout_s
        idle = 0
        while message.left:
            if self.advance():
                idle = 0
                continue
            idle += 1
            if idle < _SPINS:
                _kernel.yield_core()
                continue
            self._sleep(message, deadline_s)

    def _sleep(self, message: Message, deadline_s: float) -> None:
        """Sleeps until a peer rings, unless one has since the last look.

        This rank says that it sleeps, reads the bell, looks once more, and sleeps only while the bell reads the same.
        A peer changes its count, then the bell, then looks who sleeps. Two peers may write the same number to the bell,
        but then the count of the one that wrote second was there before this rank read the bell.
        """
        mine = self._bells[self.rank]
        mine[_ASLEEP] = 1
        try:
            _kernel.full_fence()
            seen = mine[_BELL]
            if self.advance():
                return
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise CollectiveTimeoutError(
                    f"rank {self.rank}: {message.left} bytes {message.direction} rank {message.lane.peer} are late",
                    (message.lane.peer,),
                )
            _kernel.futex_wait(self._inboxes[self.rank].base + 4 * _BELL, seen, min(_SLICE_S, left_s))
            if mine[_BELL] == seen:
                self._check_alive(message)
        finally:
            mine[_ASLEEP] = 0

    def _check_alive(self, message: Message) -> None:
        for fd, _ in self._poll.poll(0):
            if self._ranks_by_fd[fd] == message.lane.peer and not self.advance() and message.left:
                raise PeerDiedError(
                    f"rank {message.lane.peer} died with {message.left} bytes {message.direction} it under way",
                    message.lane.peer,
                )

    def close(self) -> None:
        """Gives up the inboxes; what is under way is lost."""
        for fd in self._ranks_by_fd:
            os.close(fd)
        self._ranks_by_fd = {}


class Message:
    """Bytes under way; see `Pending`."""

    __slots__ = ("data", "lane", "left", "sending", "_box")

    def __init__(self, box: Mailbox, lane: _Lane, data: torch.Tensor, *, sending: bool) -> None:
        self._box = box
        self.lane = lane
        self.data = data
        self.left = data.numel()
        self.sending = sending

    @property
    def direction(self) -> str:
        """For messages to people."""
        return "to" if self.sending else "from"

    def done(self) -> bool:
        """Whether all bytes have passed."""
        if self.left:
            self._box.advance()
        return not self.left

    def wait(self, timeout_s: float) -> None:
        """Blocks until they have; see `Mailbox.wait`."""
        self._box.wait(self, timeout_s)


class _Lane:
    """One direction between two ranks, seen from one of them; both counts lie in the receiver's inbox."""

    def __init__(self, box: Mailbox, inbox: Segment, sender: int, peer: int) -> None:
        begin = PAGE + sender * (_HEAD_NBYTES + LANE_NBYTES)
        self.peer = peer
        self.queue: deque[Message] = deque()
        self._box = box
        self._counts = inbox.view[begin : begin + _HEAD_NBYTES].cast("I")
        self._ring = inbox.tensor.narrow(0, begin + _HEAD_NBYTES, LANE_NBYTES)

    def advance(self) -> bool:
        """Moves bytes of the first message, then of the next; says whether any moved."""
        moved = False
        while self.queue and self._move(self.queue[0]):
            moved = True
            if not self.queue[0].left:
                self.queue.popleft()
        if moved:
            self._box.ring(self.peer)
        return moved

    def _move(self, message: Message) -> bool:
        counts = self._counts
        mine, theirs = (_PRODUCED, _CONSUMED) if message.sending else (_CONSUMED, _PRODUCED)
        count = counts[mine]
        used = (counts[_PRODUCED] - counts[_CONSUMED]) & _WORD
        room = LANE_NBYTES - used if message.sending else used
        place = count % LANE_NBYTES
        size = min(room, LANE_NBYTES - place, message.left)
        if not size:
            return False
        if _kernel.fence is not None:
            _kernel.fence()
        begin = message.data.numel() - message.left
        ring, data = self._ring[place : place + size], message.data[begin : begin + size]
        if message.sending:
            ring.copy_(data)
        else:
            data.copy_(ring)
        if _kernel.fence is not None:
            _kernel.fence()
        counts[mine] = (count + size) & _WORD
        message.left -= size
        return True


def open_mailbox(store: Any, rank: int, size: int, timeout: timedelta) -> Mailbox:
    """Makes this rank's inbox and maps those of its peers.

    Args:
        store: where ranks find each other (a torch store of their own).
        rank: this rank.
        size: how many there are.
        timeout: for all to come.

    Raises:
        RuntimeError: not all run on this host.
        OSError: a peer's memory cannot be mapped.
    """
    inbox = Segment.create(f"inbox-{rank}", PAGE + size * (_HEAD_NBYTES + LANE_NBYTES))
    try:
        store.set(f"inbox/{rank}", json.dumps([host_identity(), os.getpid(), inbox.fd]))
        keys = [f"inbox/{r}" for r in range(size)]
        store.wait(keys, timeout)
        found = [json.loads(raw) for raw in store.multi_get(keys)]
        elsewhere = [r for r, (host, _, _) in enumerate(found) if host != host_identity()]
        if elsewhere:
            raise RuntimeError(f"rank {elsewhere[0]} runs on another host; shared memory does not reach there")
        inboxes = [
            inbox if r == rank else Segment.attach(Address(pid, fd, inbox.nbytes))
            for r, (_, pid, fd) in enumerate(found)
        ]
        store.set(f"inbox/{rank}/mapped", "yes")
        store.wait([f"inbox/{r}/mapped" for r in range(size)], timeout)
    finally:
        inbox.close()  # mapped by everyone, or of no use
    return Mailbox(rank, inboxes, [pid for _, pid, _ in found])
