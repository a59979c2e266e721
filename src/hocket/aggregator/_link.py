"""One end of a connection inside the event loop: frames in, a queue of frames out, never blocking."""

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from ._codec import data_head, encode
from ._decoder import Decoder, Place
from ._frames import Frame, FrameType, Ping, ProtocolError
from ._pool import Array

_AT_ONCE: Final = 32
_MOST_AWAITED_NBYTES: Final = 32 << 10
"""More would make the kernel clamp the window that it offers the peer to what is awaited."""
_MOST_STALL_S: Final = 32_767
"""The kernel counts no further."""
_MOST_CONTROL_NBYTES: Final = 1 << 18
"""Replies may wait for a peer that does not read; more than this shows that it asks without reading."""

Release = Callable[[], None]


def prepare(sock: socket.socket, stall_s: float) -> None:
    """Set the options of every connection: no waiting for full packets, and an end to a peer that has vanished."""
    stall_s = min(stall_s, _MOST_STALL_S)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with contextlib.suppress(OSError, AttributeError):  # Linux has them; they only make the end come sooner
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(stall_s / 2)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(stall_s / 6)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))


class FrameLink:
    """A connection."""

    def __init__(
        self,
        sock: socket.socket,  # socket, non-blocking
        expected: frozenset[FrameType],  # types of frames that may come first
        segment_nbytes: int,  # the longest payload
        # called when the queue of what is to be sent is empty no more
        changed: "Callable[[FrameLink], None] | None" = None,
    ) -> None:
        self.sock = sock
        self.decoder = Decoder(expected, segment_nbytes)
        self.received_nbytes = 0
        self.sent_nbytes = 0
        self.heard_s = time.monotonic()
        self.moved_s = self.heard_s
        """When the queue was last empty or became shorter."""
        self.changed = changed
        self._asked_s = 0.0
        self._out: deque[tuple[memoryview, Release | None]] = deque()
        self._control_nbytes = 0
        self._awaited_nbytes = 1

    @property
    def waiting(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._out)

    def send(self, frame: Frame) -> None:
        raw = encode(frame)
        self._control_nbytes += len(raw)
        self._queue(memoryview(raw), None)

    def send_data(self, group: int, sequence: int, offset: int, payload: Array, release: Release) -> None:
        """Queue a segment; `release` is called once `payload` is not needed any more."""
        self._queue(memoryview(data_head(group, sequence, offset, payload.nbytes)), None)
        self._queue(payload.data, release)

    def _queue(self, view: memoryview, release: Release | None) -> None:
        if not self._out:
            self.moved_s = time.monotonic()
            if self.changed is not None:
                self.changed(self)
        self._out.append((view, release))

    def flush(self) -> None:
        """Send what the socket takes. Raises OSError: the connection is gone."""
        out = self._out
        while out:
            views = [out[i][0] for i in range(min(len(out), _AT_ONCE))]
            try:
                sent = self.sock.sendmsg(views)
            except BlockingIOError:
                return
            self.sent_nbytes += sent
            self.moved_s = time.monotonic()
            while out and sent >= len(out[0][0]):
                view, release = out.popleft()
                sent -= len(view)
                if release is not None:
                    release()
            if sent:
                view, release = out[0]
                out[0] = view[sent:], release
        self._control_nbytes = 0

    def answers(self, now_s: float, most_s: float) -> bool:
        """Return whether a peer that always reads has shown life in time; one that is quiet is asked."""
        if self._asked_s >= self.heard_s:
            return now_s - self._asked_s <= most_s
        if now_s - self.heard_s > most_s / 4:
            self._asked_s = now_s
            self.send(Ping(0))
        return True

    def await_nbytes(self, nbytes: int) -> None:
        """Let the kernel wake this process only for so many bytes, or an end: on a slow link every packet is an event.

        Set it after an event of this connection, before the next wait; bytes must be known to come.
        """
        nbytes = max(1, min(nbytes, _MOST_AWAITED_NBYTES))
        if nbytes != self._awaited_nbytes:
            self._awaited_nbytes = nbytes
            with contextlib.suppress(OSError):  # where it is not to be had, there are more events
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def receive(self, place: Place) -> Iterator[Frame]:
        """Take what the socket has, once, and return the frames that are complete.

        Raises:
            OSError: the connection is gone; EOFError if the peer closed it.
            ProtocolError: see Decoder.frames, or a peer that asks much and reads nothing.
        """
        try:
            nbytes = self.sock.recvmsg_into(self.decoder.buffers())[0]
        except BlockingIOError:
            return
        if not nbytes:
            raise EOFError("the peer closed the connection")
        self.received_nbytes += nbytes
        self.heard_s = time.monotonic()
        self.decoder.filled(nbytes)
        for frame in self.decoder.frames(place):
            yield frame
            if self._control_nbytes > _MOST_CONTROL_NBYTES:
                raise ProtocolError("a peer that asks for more than it reads")

    def drop_queue(self) -> None:
        """Give back what is still queued."""
        while self._out:
            release = self._out.popleft()[1]
            if release is not None:
                release()

    def close(self) -> None:
        """Close the socket; what is queued is given back."""
        self.sock.close()
        self.drop_queue()
