"""send, recv and recv-any of c10d inside a host: messages with tags over the streams of a `Mailbox`.

Before its bytes a message has a head: tag and length. A rank reads the heads of a peer from its first receive on; what
comes with a tag that nobody waits for yet is kept. Messages move while some thread *tends* the mailbox: one that waits
for a message of its own if there is one, else a thread of the group's, so that what was posted goes on beside
computation and a peer is never blocked because this rank does something else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import torch

from ..shm import kernel as _kernel
from ..transport import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommError,
    PeerDiedError,
)
from ._mailbox import Mailbox
from ._parcel import ANY, Coming, Early, Nothing, Parcel, Source

Tensor = torch.Tensor

_SPINS: Final = 30
_GRACE_S: Final = 2e-3
"""How long the group's thread leaves the tending to whoever may be about to wait; a hand-over costs some 50 us."""


class Postbox:
    """The sends and receives of one rank in one group.

    Args:
        mailbox: of this rank in this group.
        name: the group, for messages.
        numbers: the ranks' numbers in the world, for messages.
        timeout_s: for waits that name none.
    """

    def __init__(self, mailbox: Mailbox, name: str, numbers: tuple[int, ...], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._mailbox = mailbox
        self._name = name
        self._numbers = numbers
        self._lock = threading.Condition()
        self._sources: dict[int, Source] = {}
        self._of_any: deque[Parcel] = deque()
        self._sending: list[Parcel] = []
        self._open: set[Parcel] = set()
        self._count = 0
        self._tended = False
        self._waiters = 0
        self._closed = False
        self._needed = threading.Event()
        self._thread: threading.Thread | None = None

    def number(self, rank: int) -> int:
        """A rank's number in the world."""
        return self._numbers[rank]

    # --- posting ----------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, peer: int, tag: int) -> Parcel:
        """Begins to send; up to half a MiB is gone when this returns, if the peer has not left as much lying."""
        with self._lock:
            parcel = self._parcel(peer, tag, tensor, receives=False)
            head = torch.tensor([tag, parcel.nbytes], dtype=torch.int64)
            last = self._mailbox.send(head, peer)
            if parcel.nbytes:
                last = self._mailbox.send(parcel.flat, peer)
            parcel.message = last
            if last.left:
                self._sending.append(parcel)
                self._keep(parcel)
            else:
                parcel.finish()
        return parcel

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> Parcel:
        """Begins to receive from a rank, or from whichever sends first."""
        with self._lock:
            parcel = self._parcel(ANY if peer is None else peer, tag, tensor, receives=True)
            peers = [r for r in range(self._mailbox.size) if r != self._mailbox.rank] if peer is None else [peer]
            sources = [self._source(r) for r in peers]
            self._pump()
            if not any(self._take_early(source, parcel) for source in sources):
                (self._of_any if peer is None else sources[0].waiting).append(parcel)
                self._pump()
            if not parcel.over:
                self._keep(parcel)
        return parcel

    def _parcel(self, peer: int, tag: int, tensor: Tensor, *, receives: bool) -> Parcel:
        if self._closed:
            raise CommError(f"group {self._name!r} was destroyed; it sends and receives no more")
        self._count += 1
        return Parcel(self, self._count, peer, tag, tensor, receives)

    def _source(self, rank: int) -> Source:
        source = self._sources.get(rank)
        if source is None:
            source = self._sources[rank] = Source(self._mailbox, rank)
        return source

    def _keep(self, parcel: Parcel) -> None:
        """Sees to it that somebody tends the mailbox until a parcel is over."""
        self._open.add(parcel)
        if self._thread is None:
            self._thread = threading.Thread(target=self._tend_beside, name=f"hocket-post-{self._name}", daemon=True)
            self._thread.start()
        if not self._needed.is_set():
            self._needed.set()

    # --- matching, with the lock held -------------------------------------------------------------------------------

    def _pump(self) -> bool:
        """Moves what can move and matches what has come; says whether anything changed."""
        moved = self._mailbox.advance()
        for source in self._sources.values():
            while self._step(source):
                moved = True
        for parcel in [parcel for parcel in self._sending if parcel.message is not None and not parcel.message.left]:
            self._sending.remove(parcel)
            self.end(parcel)
            moved = True
        if moved:
            self._lock.notify_all()
        return moved

    def _step(self, source: Source) -> bool:
        """Goes on with a peer's next head or body, if that is there."""
        if source.body is not None:
            if source.body.left:
                return False
            self._end_body(source)
            return True
        if source.head_message.left:
            return False
        tag, nbytes = source.head.tolist()
        parcel = self._match(source, tag)
        if parcel is not None and parcel.nbytes != nbytes:
            source.wrong = f"{parcel}: rank {self.number(source.rank)} sent {nbytes} bytes"
        if parcel is None or source.wrong:
            data = torch.empty(nbytes, dtype=torch.uint8)
        else:
            data = parcel.flat.view(torch.uint8) if nbytes else parcel.flat
            parcel.peer = source.rank
        source.parcel = parcel
        source.body = self._mailbox.receive(data, source.rank) if nbytes else Nothing()
        if parcel is None:
            source.early.append(Early(tag, data, source.body))
        return True

    def _end_body(self, source: Source) -> None:
        if source.parcel is not None:
            self.end(source.parcel, CollectiveMismatchError(source.wrong) if source.wrong else None)
        source.parcel, source.body, source.wrong = None, None, ""
        source.head_message = self._mailbox.receive(source.head, source.rank)

    def _match(self, source: Source, tag: int) -> Parcel | None:
        """The receive that was posted first among those that take this message."""
        found = [
            parcel
            for row in (source.waiting, self._of_any)
            for parcel in [next((one for one in row if one.tag == tag), None)]
            if parcel is not None
        ]
        if not found:
            return None
        first = min(found, key=lambda parcel: parcel.number)
        (self._of_any if first in self._of_any else source.waiting).remove(first)
        return first

    def _take_early(self, source: Source, parcel: Parcel) -> bool:
        """Gives a receive what has come before it was posted; what is still coming is waited for here."""
        early = next((one for one in source.early if one.tag == parcel.tag), None)
        if early is None:
            return False
        source.early.remove(early)
        parcel.peer = source.rank
        error: BaseException | None = None
        if early.data.numel() != parcel.nbytes:
            error = CollectiveMismatchError(
                f"{parcel}: rank {self.number(source.rank)} sent {early.data.numel()} bytes"
            )
        elif early.message.left:
            source.parcel = Coming(self, parcel, early.data)
            return True
        elif parcel.nbytes:
            parcel.flat.view(torch.uint8).copy_(early.data)
        self.end(parcel, error)
        return True

    def end(self, parcel: Parcel, error: BaseException | None = None) -> None:
        """A parcel has passed, or never will; with the lock held."""
        parcel.finish(error)
        self._open.discard(parcel)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def look(self, parcel: Parcel) -> bool:
        """Moves what can move; says whether a parcel is over."""
        with self._lock:
            self._pump()
            return parcel.over

    def wait(self, parcel: Parcel, timeout_s: float | None) -> None:
        """Tends the mailbox until a parcel is over; see `Parcel.wait`."""
        if not parcel.over:
            with self._lock:
                self._waiters += 1
                try:
                    self._wait(parcel, self.timeout_s if timeout_s is None else timeout_s)
                finally:
                    self._waiters -= 1
        if parcel.error is not None:
            raise parcel.error

    def _wait(self, parcel: Parcel, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        if self._tended:
            self._mailbox.wake()  # the group's thread hands over
        while not parcel.over:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise CollectiveTimeoutError(
                    f"{parcel} in group {self._name!r} passed its timeout of {timeout_s:g} s on rank "
                    f"{self.number(self._mailbox.rank)}",
                    () if parcel.peer == ANY else (parcel.peer,),
                )
            if self._tended:
                self._lock.wait(min(0.1, left_s))
            else:
                self._tend(left_s, lambda: parcel.over)

    def _tend(self, left_s: float, enough: Callable[[], bool]) -> None:
        """Moves messages, and sleeps once while nothing moves; with the lock, which it gives up meanwhile."""
        for _ in range(_SPINS):
            if self._pump() or enough():
                return
            self._lock.release()
            try:
                _kernel.yield_core()
            finally:
                self._lock.acquire()
        if self._tended:
            return
        self._tended = True

        def look() -> bool:
            with self._lock:
                return self._pump() or enough()

        self._lock.release()
        try:
            rung = self._mailbox.sleep(look, left_s)
        finally:
            self._lock.acquire()
            self._tended = False
            self._lock.notify_all()
        if not rung:
            self._check_alive()

    def _check_alive(self) -> None:
        """Ends what waits for peers that have died; what they had sent before is delivered first."""
        dead = self._mailbox.dead()
        if not dead or self._pump():
            return
        everyone = len(dead) == self._mailbox.size - 1
        for parcel in list(self._open):
            if parcel.peer in dead or (parcel.peer == ANY and everyone):
                rank = next(iter(dead)) if parcel.peer == ANY else parcel.peer
                self.end(
                    parcel,
                    PeerDiedError(
                        f"rank {self.number(rank)} died or left while rank {self.number(self._mailbox.rank)} waited in "
                        f"{parcel} of group {self._name!r}",
                        rank,
                    ),
                )
        self._lock.notify_all()

    def _tend_beside(self) -> None:
        """The group's thread: tends while parcels are open that nobody waits for."""
        while not self._closed:
            self._needed.wait()
            with self._lock:
                self._lock.wait(_GRACE_S)
                if not self._open:
                    self._needed.clear()
                elif not self._tended and not self._waiters:
                    self._tend(1.0, lambda: bool(self._waiters) or not self._open)

    def close(self) -> None:
        """Gives up; what is under way is lost."""
        with self._lock:
            self._closed = True
            self._needed.set()
            self._lock.notify_all()
            self._mailbox.wake()
        if self._thread is not None:
            self._thread.join(1.0)
        self._mailbox.close()
