"""Point-to-point inside a host: a stream of bytes from every rank to every other, through shared memory.

Each rank owns an inbox with a ring of bytes for every sender. A sender writes bytes, then its count of bytes produced;
the receiver reads that count, then the bytes, then writes its count of bytes consumed. A sender that finds its ring
empty begins at the ring's begin again, and writes there at which count it did so, before the bytes. Who changes a count
wakes the other side if it sleeps. Nothing moves by itself: a rank that waits for one message moves all of its messages,
so two ranks that send each other more than a ring holds do not block each other. Messages carry no head: both sides
know from the schedule what comes next. For the fence between bytes and counts see `_kernel`.
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

from ..shm import PAGE, Address, Liveness, SharedSegment, host_identity
from ..shm import kernel as _kernel
from ..transport import CollectiveTimeoutError, PeerDiedError

_LEAST_NBYTES: Final = 1 << 19  # of a ring
_MOST_NBYTES: Final = 1 << 24
_INBOX_NBYTES: Final = 1 << 26  # all rings of an inbox, unless the least ones take more
_PIECE_NBYTES: Final = 1 << 18  # the other side is told of each piece, so that both copy at once
_LINE: Final = 16  # words of 4 bytes
_BELL, _ASLEEP, _LEFT = 0, _LINE, 2 * _LINE  # in the inbox's first page
_PRODUCED, _BASE, _CONSUMED = 0, 1, _LINE  # in a stream's head; the base is the count at which the ring begins
_HEAD_NBYTES: Final = 2 * 4 * _LINE
_WORD: Final = 0xFFFFFFFF
_SPINS: Final = 20
_SLICE_S: Final = 0.1


def stream_nbytes(size: int) -> int:
    """Return the size of a ring among so many ranks of a host: a message of it is on its way before its receiver comes.

    Stages of a pipeline compute on with messages of megabytes under way: one that did not fit would wait until its
    sender waits, too. Pages that nothing was written to take no memory.
    """
    return max(_LEAST_NBYTES, min(_MOST_NBYTES, _INBOX_NBYTES >> (size - 1).bit_length()))


class ShmStreams:
    """This rank's inbox and its ways into those of its peers; a `PointToPoint`. Not safe for several threads.

    Args:
        rank: Number of this rank.
        size: Number of ranks.
        inbox: Inbox of this rank.
        find: Function that gives a peer's inbox and process number; called once for each peer, when first needed.
    """

    name = "shared memory"

    def __init__(
        self, rank: int, size: int, inbox: SharedSegment, find: Callable[[int], tuple[SharedSegment, int]]
    ) -> None:
        self.rank = rank
        self.size = size
        self._inbox = inbox
        self._mine = inbox.view[:PAGE].cast("I")
        self._find = find
        self._peers: dict[int, _Peer] = {}
        self._busy: list[StreamTransfer] = []
        self._liveness = Liveness()

    def send(self, flat: torch.Tensor, peer: int) -> StreamTransfer:
        """See PointToPoint; what fits in the ring is copied at once."""
        return self._begin(StreamTransfer(self, self.peer(peer).outward, flat.view(torch.uint8), sending=True))

    def receive(self, flat: torch.Tensor, peer: int) -> StreamTransfer:
        return self._begin(StreamTransfer(self, self.peer(peer).inward, flat.view(torch.uint8), sending=False))

    def _begin(self, message: StreamTransfer) -> StreamTransfer:
        if not message.left:  # nothing travels
            return message
        message.stream.queue.append(message)
        message.stream.advance()
        if message.left:
            self._busy.append(message)
        return message

    def peer(self, rank: int) -> _Peer:
        """Return a peer's inbox, mapped when it is first asked for."""
        peer = self._peers.get(rank)
        if peer is None:
            inbox, pid = self._find(rank)
            outward, inward = _Stream(self, inbox, self.rank, rank), _Stream(self, self._inbox, rank, rank)
            peer = self._peers[rank] = _Peer(inbox, inbox.view[:PAGE].cast("I"), outward, inward)
            self._liveness.watch(rank, pid)
        return peer

    def map_all(self) -> None:
        """Map all peers now: one that has sent and ended could not be mapped later, and its message not be received.

        Raises:
            OSError: a peer's memory cannot be mapped.
        """
        for rank in range(self.size):
            if rank != self.rank:
                self.peer(rank)

    def advance(self) -> bool:
        """Move whatever can move; say whether anything did."""
        moved = False
        for message in self._busy:
            if message.stream.advance():
                moved = True
        if moved:
            self._busy = [message for message in self._busy if message.left]
        return moved

    def ring(self, rank: int) -> None:
        """Tell a peer that a count has changed. See `sleep` for why it cannot miss it."""
        _kernel.full_fence()
        peer = self._peers[rank]
        peer.words[_BELL] = (peer.words[_BELL] + 1) & _WORD
        _kernel.full_fence()
        if peer.words[_ASLEEP]:
            _kernel.futex_wake(peer.inbox.base + 4 * _BELL)

    def wait(self, message: StreamTransfer, timeout_s: float) -> None:
        """Move messages until one is done.

        Raises:
            CollectiveTimeoutError: it was not within `timeout_s`.
            PeerDiedError: its peer has died.
        """
        looked_s = time.monotonic()
        deadline_s = looked_s + timeout_s
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
                    f"rank {self.rank}: {message.left} bytes {message.direction} rank {message.stream.peer} are late",
                    (message.stream.peer,),
                )
            rung, now_s = self.sleep(self.advance, left_s), time.monotonic()
            if rung and now_s < looked_s + 2 * _SLICE_S:  # others may ring all the time
                continue
            looked_s = now_s
            if message.stream.peer in self.dead():
                self.advance()  # what it had sent before it died is still here
                if message.left:
                    raise PeerDiedError(
                        f"rank {message.stream.peer} died with {message.left} bytes {message.direction} it under way",
                        message.stream.peer,
                    )

    def sleep(self, look: Callable[[], bool], timeout_s: float) -> bool:
        """Sleep until a peer rings, a tenth of a second at most; at once if `look` finds that something has moved.

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
        """Wake whoever sleeps in this process."""
        self._mine[_BELL] = (self._mine[_BELL] + 1) & _WORD
        _kernel.futex_wake(self._inbox.base + 4 * _BELL)

    def dead(self) -> set[int]:
        """Return the peers that messages have gone to or come from and that have ended or left."""
        return self._liveness.ranks() | {rank for rank, peer in self._peers.items() if peer.words[_LEFT]}

    def leave(self) -> None:
        """Tell the peers that this rank sends and receives no more."""
        self._mine[_LEFT] = 1
        for rank in self._peers:
            self.ring(rank)

    def state(self, rank: int) -> str:
        """Return, for a message, that a peer is stopped; "" if it is not."""
        return self._liveness.state(rank)

    def close(self) -> None:
        """Give up the peers; what is under way is lost."""
        self._liveness.close()
        self._inbox.close()


class _Peer(NamedTuple):
    """Another rank: its inbox, the first words of that, and the streams to and from it."""

    inbox: SharedSegment
    words: memoryview
    outward: _Stream
    inward: _Stream


class StreamTransfer:
    """Bytes under way; see `PendingMessage`."""

    __slots__ = ("data", "stream", "left", "sending", "_streams")

    def __init__(self, streams: ShmStreams, stream: _Stream, data: torch.Tensor, *, sending: bool) -> None:
        self._streams = streams
        self.stream = stream
        self.data = data
        self.left = data.numel()
        self.sending = sending

    @property
    def direction(self) -> str:
        """For messages to people."""
        return "to" if self.sending else "from"

    def done(self) -> bool:
        """Return whether all bytes have passed."""
        if self.left:
            self._streams.advance()
        return not self.left

    def wait(self, timeout_s: float) -> None:
        """Block until they have; see `ShmStreams.wait`."""
        self._streams.wait(self, timeout_s)


class _Stream:
    """One direction between two ranks, seen from one of them; both counts lie in the receiver's inbox."""

    def __init__(self, streams: ShmStreams, inbox: SharedSegment, sender: int, peer: int) -> None:
        self._nbytes = stream_nbytes(streams.size)
        begin = PAGE + sender * (_HEAD_NBYTES + self._nbytes)
        self.peer = peer
        self.queue: deque[StreamTransfer] = deque()
        self._streams = streams
        self._counts = inbox.view[begin : begin + _HEAD_NBYTES].cast("I")
        self._ring = inbox.tensor.narrow(0, begin + _HEAD_NBYTES, self._nbytes)

    def advance(self) -> bool:
        """Move bytes of the first message, then of the next; say whether any moved."""
        moved = untold = False
        while self.queue and (size := self._move(self.queue[0])):
            moved, untold = True, size < _PIECE_NBYTES
            if not untold:
                self._streams.ring(self.peer)
            if not self.queue[0].left:
                self.queue.popleft()
        if untold:
            self._streams.ring(self.peer)
        return moved

    def _move(self, message: StreamTransfer) -> int:
        counts = self._counts
        mine = _PRODUCED if message.sending else _CONSUMED
        count, used = counts[mine], (counts[_PRODUCED] - counts[_CONSUMED]) & _WORD
        free_nbytes = self._nbytes - used if message.sending else used
        if not free_nbytes:
            return 0
        if _kernel.fence is not None:
            _kernel.fence()
        if message.sending and not used:
            counts[_BASE] = count  # an empty ring begins anew, in pages that are there and warm
        place = ((count - counts[_BASE]) & _WORD) % self._nbytes
        size = min(free_nbytes, self._nbytes - place, message.left, _PIECE_NBYTES)
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
        return size


def open_streams(store: Any, rank: int, size: int, timeout: timedelta) -> ShmStreams:
    """Make this rank's inbox and wait until all ranks have one.

    Args:
        store: Store where ranks find each other (a torch store of their own).
        rank: Number of this rank.
        size: Number of ranks.
        timeout: Time for all to come.

    Raises:
        RuntimeError: not all run on this host.
        OSError: a peer's memory cannot be mapped.
    """
    streams = publish_streams(store, rank, size)
    keys = [f"inbox/{r}" for r in range(size)]
    store.wait(keys, timeout)
    hosts = [json.loads(raw)[0] for raw in store.multi_get(keys)]
    elsewhere = [r for r, host in enumerate(hosts) if host != host_identity()]
    if elsewhere:
        raise RuntimeError(f"rank {elsewhere[0]} runs on another host; shared memory does not reach there")
    streams.map_all()
    store.set(f"inbox/{rank}/mapped", "yes")
    store.wait([f"inbox/{r}/mapped" for r in range(size)], timeout)
    return streams


def publish_streams(store: Any, rank: int, size: int) -> ShmStreams:
    """Make this rank's inbox known. Peers are mapped by `map_all`, when all have published theirs.

    Raises:
        OSError: no shared memory.
    """
    inbox = SharedSegment.create(f"inbox-{rank}", PAGE + size * (_HEAD_NBYTES + stream_nbytes(size)))
    store.set(f"inbox/{rank}", json.dumps([host_identity(), os.getpid(), inbox.fd]))

    def find(peer: int) -> tuple[SharedSegment, int]:
        _, pid, fd = json.loads(store.get(f"inbox/{peer}"))
        return SharedSegment.attach(Address(pid, fd, inbox.nbytes)), pid

    return ShmStreams(rank, size, inbox, find)
