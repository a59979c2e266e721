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
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch

from ..shm import (
    PAGE,
    Address,
    Deaths,
    Segment,
    host_identity,
)
from ..shm import kernel as _kernel
from ..transport import CollectiveTimeoutError, PeerDiedError

LANE_NBYTES: Final = 1 << 19  # a message of this size is on its way before its receiver has come; fits in the L2 cache
_LINE: Final = 16  # words of 4 bytes
_BELL, _ASLEEP = 0, _LINE  # in the inbox's first page
_PRODUCED, _CONSUMED = 0, _LINE  # in a lane's head
_HEAD_NBYTES: Final = 2 * 4 * _LINE
_WORD: Final = 0xFFFFFFFF
_SPINS: Final = 20
_SLICE_S: Final = 0.1


class Mailbox:
    """This rank's inbox and its ways into those of its peers; a `PointToPoint`. Not safe for several threads.

    Args:
        rank: this rank.
        size: how many there are.
        inbox: this rank's own.
        find: gives a peer's inbox and process number; called once for each peer, when it is first needed.
    """

    name = "shared memory"

    def __init__(self, rank: int, size: int, inbox: Segment, find: Callable[[int], tuple[Segment, int]]) -> None:
        self.rank = rank
        self.size = size
        self._inbox = inbox
        self._mine = inbox.view[:PAGE].cast("I")
        self._find = find
        self._peers: dict[int, _Peer] = {}
        self._busy: list[Message] = []
        self._deaths = Deaths()

    def send(self, flat: torch.Tensor, peer: int) -> Message:
        """See PointToPoint; what fits in the ring is copied at once."""
        return self._begin(Message(self, self.peer(peer).outward, flat.view(torch.uint8), sending=True))

    def receive(self, flat: torch.Tensor, peer: int) -> Message:
        """See PointToPoint."""
        return self._begin(Message(self, self.peer(peer).inward, flat.view(torch.uint8), sending=False))

    def _begin(self, message: Message) -> Message:
        message.lane.queue.append(message)
        message.lane.advance()
        if message.left:
            self._busy.append(message)
        return message

    def peer(self, rank: int) -> _Peer:
        """A peer's inbox, mapped when it is first asked for."""
        peer = self._peers.get(rank)
        if peer is None:
            inbox, pid = self._find(rank)
            outward, inward = _Lane(self, inbox, self.rank, rank), _Lane(self, self._inbox, rank, rank)
            peer = self._peers[rank] = _Peer(inbox, inbox.view[:PAGE].cast("I"), outward, inward)
            self._deaths.watch(rank, pid)
        return peer

    def map_all(self) -> None:
        """Maps all peers now: one that has sent and ended could not be mapped later, and its message not be received.

        Raises:
            OSError: a peer's memory cannot be mapped.
        """
        for rank in range(self.size):
            if rank != self.rank:
                self.peer(rank)

    def advance(self) -> bool:
        """Moves whatever can move; says whether anything did."""
        moved = False
        for message in self._busy:
            if message.lane.advance():
                moved = True
        if moved:
            self._busy = [message for message in self._busy if message.left]
        return moved

    def ring(self, rank: int) -> None:
        """Tells a peer that a count has changed. See `sleep` for why it cannot miss it."""
        _kernel.full_fence()
        peer = self._peers[rank]
        peer.words[_BELL] = (peer.words[_BELL] + 1) & _WORD
        _kernel.full_fence()
        if peer.words[_ASLEEP]:
            _kernel.futex_wake(peer.inbox.base + 4 * _BELL)

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
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise CollectiveTimeoutError(
                    f"rank {self.rank}: {message.left} bytes {message.direction} rank {message.lane.peer} are late",
                    (message.lane.peer,),
                )
            if not self.sleep(self.advance, left_s) and message.lane.peer in self.dead():
                self.advance()  # what it had sent before it died is still here
                if message.left:
                    raise PeerDiedError(
                        f"rank {message.lane.peer} died with {message.left} bytes {message.direction} it under way",
                        message.lane.peer,
                    )

    def sleep(self, look: Callable[[], bool], timeout_s: float) -> bool:
        """Sleeps until a peer rings, a tenth of a second at most; at once if `look` finds that something has moved.

        This rank says that it sleeps, reads the bell, looks once more, and sleeps only while the bell reads the same.
        A peer changes its count, then the bell, then looks who sleeps. Two peers may write the same number to the bell,
        but then the count of the one that wrote second was there before this rank read the bell.

        Returns:
            Whether something has moved or a peer has rung.
        """
        mine = self._mine
        mine[_ASLEEP] = 1
        try:
            _kernel.full_fence()
            seen = mine[_BELL]
            if look():
                return True
            _kernel.futex_wait(self._inbox.base + 4 * _BELL, seen, min(_SLICE_S, timeout_s))
            return bool(mine[_BELL] != seen)
        finally:
            mine[_ASLEEP] = 0

    def wake(self) -> None:
        """Wakes whoever sleeps in this process."""
        self._mine[_BELL] = (self._mine[_BELL] + 1) & _WORD
        _kernel.futex_wake(self._inbox.base + 4 * _BELL)

    def dead(self) -> set[int]:
        """The peers that messages have gone to or come from and whose processes have ended."""
        return self._deaths.ranks()

    def close(self) -> None:
        """Gives up the peers; what is under way is lost."""
        self._deaths.close()
        self._inbox.close()


class _Peer(NamedTuple):
    """Another rank: its inbox, the first words of that, and the lanes to and from it."""

    inbox: Segment
    words: memoryview
    outward: _Lane
    inward: _Lane


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
    """Makes this rank's inbox and waits until all ranks have one.

    Args:
        store: where ranks find each other (a torch store of their own).
        rank: this rank.
        size: how many there are.
        timeout: for all to come.

    Raises:
        RuntimeError: not all run on this host.
        OSError: a peer's memory cannot be mapped.
    """
    mailbox = publish_mailbox(store, rank, size)
    keys = [f"inbox/{r}" for r in range(size)]
    store.wait(keys, timeout)
    hosts = [json.loads(raw)[0] for raw in store.multi_get(keys)]
    elsewhere = [r for r, host in enumerate(hosts) if host != host_identity()]
    if elsewhere:
        raise RuntimeError(f"rank {elsewhere[0]} runs on another host; shared memory does not reach there")
    mailbox.map_all()
    store.set(f"inbox/{rank}/mapped", "yes")
    store.wait([f"inbox/{r}/mapped" for r in range(size)], timeout)
    return mailbox


def publish_mailbox(store: Any, rank: int, size: int) -> Mailbox:
    """Makes this rank's inbox known. Peers are mapped by `map_all`, when all have published theirs.

    Raises:
        OSError: no shared memory.
    """
    inbox = Segment.create(f"inbox-{rank}", PAGE + size * (_HEAD_NBYTES + LANE_NBYTES))
    store.set(f"inbox/{rank}", json.dumps([host_identity(), os.getpid(), inbox.fd]))

    def find(peer: int) -> tuple[Segment, int]:
        _, pid, fd = json.loads(store.get(f"inbox/{peer}"))
        return Segment.attach(Address(pid, fd, inbox.nbytes)), pid

    return Mailbox(rank, size, inbox, find)
