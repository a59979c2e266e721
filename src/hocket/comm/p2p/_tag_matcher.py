"""send, recv and recv-any of c10d inside a host: messages with tags over the streams of a `ShmStreams`.

Before its bytes a message has a head: tag, length and type. A rank reads the heads of a peer from its first receive on;
what comes with a tag that nobody waits for yet is kept. Messages move while some thread *tends* the streams: one that
waits for a message of its own if there is one, else a thread of the group's, so that what was posted goes on beside
computation and a peer is never blocked because this rank does something else.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from ..shm import LONGER
from ..shm import kernel as _kernel
from ..transport import CollectiveMismatchError, CollectiveTimeoutError, CommError, PeerDiedError
from ..transport import observers as _observe
from ._requests import ANY, EmptyBody, PeerQueues, TaggedRequest, UnexpectedCopy, UnexpectedMessage, described
from ._shm_streams import ShmStreams

_SPINS: Final = 30
_GRACE_S: Final = 2e-3
"""How long the group's thread leaves the tending to whoever may be about to wait; a hand-over costs some 50 us."""
_LOOK_S: Final = 0.3  # between looks for peers that have died, while others ring


class TagMatcher:
    """The sends and receives of one rank in one group.

    Messages call the ranks by their `numbers` in the world; `timeout_s` is for waits that name none; `check` raises
    what is known of ranks that have ended.
    """

    def __init__(
        self,
        streams: ShmStreams,
        name: str,
        numbers: tuple[int, ...],
        timeout_s: float,
        check: Callable[[Sequence[int], str], None],
    ) -> None:
        self.timeout_s = timeout_s
        self._check = check
        self._shm_streams = streams
        self._name = name
        self._numbers = numbers
        self._lock = threading.Condition()
        self._sources: dict[int, PeerQueues] = {}
        self._of_any: deque[TaggedRequest] = deque()
        self._sending: list[TaggedRequest] = []
        self._open: set[TaggedRequest] = set()
        self._count = 0
        self._tended = False
        self._looked_s = time.monotonic()  # for peers that have died
        self._waiters = 0
        self._closed = False
        self._needed = threading.Event()
        self._thread: threading.Thread | None = None

    def number(self, rank: int) -> int:
        """Return a rank's number in the world."""
        return self._numbers[rank]

    # --- posting ----------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, peer: int, tag: int) -> TaggedRequest:
        """Begin to send; what fits into the peer's ring is gone when this returns."""
        with self._lock:
            request = self._request(peer, tag, tensor, receives=False)
            if time.monotonic() > self._looked_s + _LOOK_S:  # what fits into the ring of a rank that is gone is lost
                if peer in (dead := self._shm_streams.dead()):
                    raise self._death(request, dead)
                self._looked_s = time.monotonic()
            head = torch.tensor([tag, request.nbytes, request.form], dtype=torch.int64)
            last = self._shm_streams.send(head, peer)
            if request.nbytes:
                last = self._shm_streams.send(request.flat, peer)
            request.message = last
            if last.left:
                self._sending.append(request)
                self._keep(request)
            else:
                request.finish()
        return request

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> TaggedRequest:
        """Begin to receive from a rank, or from whichever sends first."""
        with self._lock:
            request = self._request(ANY if peer is None else peer, tag, tensor, receives=True)
            peers = (
                [r for r in range(self._shm_streams.size) if r != self._shm_streams.rank] if peer is None else [peer]
            )
            sources = [self._source(r) for r in peers]
            self._pump()
            if not any(self._take_early(source, request) for source in sources):
                (self._of_any if peer is None else sources[0].posted).append(request)
                self._pump()
            if not request.over:
                self._keep(request)
        return request

    def _request(self, peer: int, tag: int, tensor: Tensor, *, receives: bool) -> TaggedRequest:
        if self._closed:
            raise CommError(f"group {self._name!r} was destroyed; it sends and receives no more")
        if self._thread is None:
            thread = threading.Thread(target=self._tend_beside, name=f"hocket-post-{self._name}", daemon=True)
            thread.start()  # fails where there are too many: then nothing is posted
            self._thread = thread
        self._count += 1
        return TaggedRequest(self, self._count, peer, tag, tensor, receives)

    def _source(self, rank: int) -> PeerQueues:
        source = self._sources.get(rank)
        if source is None:
            source = self._sources[rank] = PeerQueues(self._shm_streams, rank)
        return source

    def _keep(self, request: TaggedRequest) -> None:
        """See to it that somebody tends the streams until a request is over."""
        self._open.add(request)
        if not self._needed.is_set():
            self._needed.set()

    # --- matching, with the lock held -------------------------------------------------------------------------------

    def _pump(self) -> bool:
        """Move what can move and match what has come; say whether anything changed."""
        moved = self._shm_streams.advance()
        for source in self._sources.values():
            while self._step(source):
                moved = True
        for request in [
            request for request in self._sending if request.message is not None and not request.message.left
        ]:
            self._sending.remove(request)
            self.end(request)
            moved = True
        if moved:
            self._lock.notify_all()
        return moved

    def _step(self, source: PeerQueues) -> bool:
        """Go on with a peer's next head or body, if that is there."""
        if source.body is not None:
            if source.body.left:
                return False
            self._end_body(source)
            return True
        if source.head_message.left:
            return False
        tag, nbytes, form = source.head.tolist()
        request = self._match(source, tag)
        if request is not None and (request.nbytes, request.form) != (nbytes, form):
            source.wrong = f"{request}: rank {self.number(source.rank)} sent {described(nbytes, form)}"
        if request is None or source.wrong:
            data = torch.empty(nbytes, dtype=torch.uint8)
        else:
            data = request.flat.view(torch.uint8) if nbytes else request.flat
            request.peer = source.rank
        source.request = request
        source.body = self._shm_streams.receive(data, source.rank) if nbytes else EmptyBody()
        if request is None:
            source.unexpected.append(UnexpectedMessage(tag, form, data, source.body))
        return True

    def _end_body(self, source: PeerQueues) -> None:
        if source.request is not None:
            self.end(source.request, CollectiveMismatchError(source.wrong) if source.wrong else None)
        source.request, source.body, source.wrong = None, None, ""
        source.head_message = self._shm_streams.receive(source.head, source.rank)

    def _match(self, source: PeerQueues, tag: int) -> TaggedRequest | None:
        """Return the receive that was posted first among those that take this message."""
        found = [
            request
            for row in (source.posted, self._of_any)
            for request in [next((one for one in row if one.tag == tag), None)]
            if request is not None
        ]
        if not found:
            return None
        first = min(found, key=lambda request: request.number)
        (self._of_any if first in self._of_any else source.posted).remove(first)
        return first

    def _take_early(self, source: PeerQueues, request: TaggedRequest) -> bool:
        """Give a receive what has come before it was posted; what is still coming is waited for here."""
        early = next((one for one in source.unexpected if one.tag == request.tag), None)
        if early is None:
            return False
        source.unexpected.remove(early)
        request.peer = source.rank
        error: BaseException | None = None
        if (early.data.numel(), early.form) != (request.nbytes, request.form):
            sent = described(early.data.numel(), early.form)
            error = CollectiveMismatchError(f"{request}: rank {self.number(source.rank)} sent {sent}")
        elif early.message.left:
            source.request = UnexpectedCopy(self, request, early.data)
            return True
        elif request.nbytes:
            request.flat.view(torch.uint8).copy_(early.data)
        self.end(request, error)
        return True

    def end(self, request: TaggedRequest, error: BaseException | None = None) -> None:
        """Finish a request that has passed, or never will; with the lock held."""
        request.finish(error)
        self._open.discard(request)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def look(self, request: TaggedRequest) -> bool:
        """Move what can move; say whether a request is over."""
        with self._lock:
            self._pump()
            return request.over

    def wait(self, request: TaggedRequest, timeout_s: float | None) -> None:
        """Tend the streams until a request is over; see `TaggedRequest.wait`."""
        if not request.over:
            if (progress := _observe.progress) is not None:
                peer = -1 if request.peer == ANY else self.number(request.peer)
                progress.message_waiting(peer, request.nbytes, request.receives)
            with self._lock:
                self._waiters += 1
                try:
                    self._wait(request, self.timeout_s if timeout_s is None else timeout_s)
                finally:
                    self._waiters -= 1
                    if progress is not None:
                        progress.message_waited()
        if request.error is not None:
            raise request.error

    def _wait(self, request: TaggedRequest, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        if self._tended:
            self._shm_streams.wake()  # the group's thread hands over
        while not request.over:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                late = () if request.peer == ANY else (request.peer,)
                raise CollectiveTimeoutError(
                    f"{request} in group {self._name!r} passed its timeout of {timeout_s:g} s on rank "
                    f"{self.number(self._shm_streams.rank)}{self._stopped()}. {LONGER}",
                    late,
                    tuple(self.number(rank) for rank in late),
                )
            if self._tended:
                self._lock.wait(min(0.1, left_s))
            else:
                self._tend(left_s, lambda: request.over)

    def _tend(self, left_s: float, enough: Callable[[], bool]) -> None:
        """Move messages, and sleep once while nothing moves; with the lock, which it gives up meanwhile."""
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
            rung = self._shm_streams.sleep(look, left_s)
        finally:
            self._lock.acquire()
            self._tended = False
            self._lock.notify_all()
        if not rung or time.monotonic() > self._looked_s + _LOOK_S:  # others may ring all the time
            self._check_alive()

    def _check_alive(self) -> None:
        """End what waits for peers that have died; what they had sent before is delivered first."""
        self._looked_s = time.monotonic()
        dead = self._shm_streams.dead()
        if not dead or self._pump():
            return
        everyone = len(dead) == self._shm_streams.size - 1
        for request in list(self._open):
            if request.peer in dead or (request.peer == ANY and everyone):
                self.end(request, self._death(request, dead))
        self._lock.notify_all()

    def _death(self, request: TaggedRequest, dead: Iterable[int]) -> CommError:
        """Return the error of a request whose peer is among ranks that have died or left."""
        rank = next(iter(dead)) if request.peer == ANY else request.peer
        try:
            self._check(tuple(dead) if request.peer == ANY else (rank,), str(request))
        except CommError as known:
            return known
        return PeerDiedError(
            f"rank {self.number(rank)} died or left while rank {self.number(self._shm_streams.rank)} "
            f"waited in {request} of group {self._name!r}",
            rank,
            (self.number(rank),),
        )

    def _stopped(self) -> str:
        """Return, for a message, which ranks are stopped: the peer may itself wait for one that is."""
        states = {r: self._shm_streams.state(r) for r in range(self._shm_streams.size)}
        return "".join(f"; rank {self.number(r)} has not come{state}" for r, state in states.items() if state)

    def _tend_beside(self) -> None:
        """Tend the streams in the group's thread while requests are open that nobody waits for."""
        while not self._closed:
            self._needed.wait()
            with self._lock:
                self._lock.wait(_GRACE_S)
                if not self._open:
                    self._needed.clear()
                elif not self._tended and not self._waiters:
                    self._tend(1.0, lambda: bool(self._waiters) or not self._open)

    def leave(self) -> None:
        """Tell the peers that this rank sends and receives no more."""
        self._shm_streams.leave()

    def close(self) -> None:
        """Give up; what is under way is lost."""
        with self._lock:
            self._closed = True
            self._shm_streams.leave()  # peers that still wait for this rank are told
            self._needed.set()
            self._lock.notify_all()
            self._shm_streams.wake()
        if self._thread is not None:
            self._thread.join(1.0)
        self._shm_streams.close()
