"""A client's connection to an aggregator: it moves the bytes of all its groups, both ways at once. No torch here."""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from . import _frames as wire
from ._errors import AggregationError, AggregatorLostError, GroupFailedError
from ._handshake import Applicant
from ._link import FrameLink, prepare
from ._membership import AHEAD_NBYTES, AggregationGroup, AggregationWork

_AWAIT_S: Final = 0.02
"""While the kernel wakes this process for many bytes only, it looks itself so often: for a failure, which is few."""
_FAREWELL_S: Final = 0.5
_LOOK_S: Final = 0.05
"""How long several connections may stay quiet before deadlines and failures are looked at again."""


class AggregationClient:
    """A connection to an aggregator; safe to use from several threads.

    Args:
        address: Host and port.
        token: Token of the job.
        timeout_s: Seconds for connecting and proving.
        stall_s: Seconds of silence, answers to pings included, after which the aggregator counts as lost.

    Raises:
        AggregatorLostError: it cannot be reached, does not hold the token, or refuses.
    """

    def __init__(self, address: tuple[str, int], token: bytes, *, timeout_s: float = 5.0, stall_s: float = 5.0) -> None:
        self._where = f"aggregator {address[0]}:{address[1]}"
        self._stall_s = stall_s
        self.lock = threading.RLock()
        """Held by whoever changes the state of the connection, its groups or their works."""
        self._groups: dict[int, AggregationGroup] = {}
        self._handle = 0  # the last that was given to a group
        self.error: AggregatorLostError | None = None
        """How the connection ended, once it has."""
        self._pinged_s = 0.0
        try:
            sock = socket.create_connection(address, timeout_s)
        except OSError as error:
            raise AggregatorLostError(f"{self._where} cannot be reached: {error}") from None
        prepare(sock, max(stall_s, 1.0))
        self._link = FrameLink(
            sock, frozenset({wire.FrameType.CHALLENGE, wire.FrameType.REFUSE}), wire.MOST_SEGMENT_NBYTES
        )
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._interest = select.POLLIN
        self.welcome: wire.Welcome | None = None
        self._applicant = Applicant(token)
        self._applicant.greet(self._link)
        try:
            self.drive(lambda: self.welcome is not None, time.monotonic() + timeout_s, "to be let in")
        except AggregationError:
            self.close()
            raise
        except TimeoutError as error:
            self.close()
            raise AggregatorLostError(str(error)) from None

    def join(
        self, name: str, total: int, position: int, *, levels: Sequence[wire.Level] | None = None, label: str = ""
    ) -> AggregationGroup:
        """Take part in a group; `AggregationGroup.wait` blocks until all members have come.

        Args:
            name: Name of the group; all members give the same.
            total: How many members it has.
            position: Position of this member.
            levels: Way up the tree, this aggregator's level first; by default all members are its children.
            label: Name of this member in errors.

        Raises:
            AggregatorLostError: the connection is gone.
        """
        with self.lock:
            self._handle += 1
            levels = levels or (wire.Level(total, position, position, 1),)
            group = AggregationGroup(self, self._handle, total, position)
            self._groups[self._handle] = group
            text = (label or f"member {position}").encode()[:200]
            self._link.send(wire.Join(self._handle, total, tuple(levels), name.encode(), text))
            self.look()
            return group

    def close(self) -> None:
        """Leave: other members' operations with this one fail."""
        for group in list(self._groups.values()):
            group.leave()
        if self.error is None:
            self.error = AggregatorLostError(f"the connection to {self._where} was closed")
            self._bid_farewell()
        self._link.sock.close()

    def _bid_farewell(self) -> None:
        """Drain, then close: closing a socket in which something is unread throws away what it has still to send."""
        sock = self._link.sock
        try:
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(_FAREWELL_S)
            deadline_s = time.monotonic() + _FAREWELL_S
            while sock.recv(1 << 16) and time.monotonic() < deadline_s:
                pass
        except OSError:
            return

    def look(self) -> None:
        """Take in what has come while nobody waited, without blocking.

        Raises:
            AggregatorLostError: the connection is gone.
        """
        with self.lock:
            self._step(time.monotonic(), 0.0)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes sent and received."""
        return self._link.sent_nbytes, self._link.received_nbytes

    # --- called by groups and works -----------------------------------------------------------------------------------

    def forget(self, group: AggregationGroup, handle: int) -> None:
        """Move bytes for a group no more, and say so while there is somebody to say it to."""
        with self.lock:
            if self._groups.pop(handle, None) is not None and group.failure is None and self.error is None:
                self._link.send(wire.Leave(handle))
                with contextlib.suppress(OSError):
                    self._link.flush()

    def drive(self, finished: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Move bytes until `finished()`.

        Raises:
            AggregatorLostError: the connection is gone, or silent for too long.
            TimeoutError: `deadline_s` has passed.
        """
        began_s = time.monotonic()
        while not finished():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self.lock.acquire(timeout=left_s):
                raise TimeoutError(f"{self._where}: no time left {what}")
            try:
                if not finished():
                    self._step(began_s, left_s)
            finally:
                self.lock.release()

    def advance(self, began_s: float, waiting: select.poll) -> bool:
        """Move what can be moved now; if that is nothing, register in `waiting` what must be waited for."""
        with self.lock:
            if self._step(began_s, 0.0):
                return True
            waiting.register(self._link.sock, self._interest)
            return False

    # --- inside -------------------------------------------------------------------------------------------------------

    def _step(self, began_s: float, wait_s: float) -> bool:
        """Send and receive what is possible, and wait up to `wait_s` for that.

        Silence before `began_s` is nobody's fault; a `wait_s` of 0 is to look only. Returns whether anything came, or
        may be sent now.
        """
        if self.error is not None:
            raise self.error
        try:
            self._pump()
            interest = select.POLLIN | (select.POLLOUT if self._link.waiting else 0)
            if interest != self._interest:
                self._poll.modify(self._link.sock, interest)
                self._interest = interest
            awaited_nbytes = self._awaited_nbytes()
            self._link.await_nbytes(awaited_nbytes)
            most_s = _AWAIT_S if awaited_nbytes > 1 else self._stall_s / 4
            events = self._poll.poll(1000 * min(wait_s, most_s))
            if events or awaited_nbytes > 1:
                before = self._link.received_nbytes
                for frame in self._link.receive(self._place):
                    self._handle_frame(frame)
                if events or self._link.received_nbytes != before:
                    return True
            now_s = time.monotonic()
            quiet_s = now_s - max(self._link.heard_s, began_s)
            if quiet_s > self._stall_s:
                raise TimeoutError(f"it has not answered for {quiet_s:.1f} s")
            if quiet_s > self._stall_s / 4 and now_s - self._pinged_s > self._stall_s / 4:
                self._pinged_s = now_s
                self._link.send(wire.Ping(0))
                self._link.flush()
            return False
        except (OSError, EOFError, wire.ProtocolError) as error:
            self.error = AggregatorLostError(f"{self._where} is lost: {error or type(error).__name__}")
            self._link.sock.close()
            raise self.error from None

    def _awaited_nbytes(self) -> int:
        """For how many bytes at least it is worth to wake: those that come in any case."""
        if self._link.waiting or len(self._groups) > 1:
            return 1
        decoder = self._link.decoder
        to_come_nbytes = sum(group.awaited_nbytes for group in self._groups.values()) - decoder.begun_nbytes
        return max(to_come_nbytes, decoder.missing_nbytes)

    def _pump(self) -> None:
        """Queue as much as windows allow, in turns among groups, and send what the socket takes."""
        link = self._link
        while True:  # until windows are used up, at the latest
            queued = sum(group.feed(link) for group in list(self._groups.values()))
            link.flush()
            if link.waiting or not queued:
                return
            if queued >= AHEAD_NBYTES:
                os.sched_yield()

    def _place(self, data: wire.Data) -> memoryview:
        group = self._groups.get(data.group)
        if group is None or group.failure is not None:
            return memoryview(bytearray(data.nbytes))
        return group.place(data)

    def _handle_frame(self, frame: wire.Frame) -> None:
        match frame:
            case wire.Ping():
                self._link.send(wire.Pong(frame.number))
            case wire.Joined() | wire.Data() | wire.Credit() | wire.Done() | wire.Fail():
                group = self._groups.get(frame.group)
                if group is not None:
                    group.handle_frame(frame, self._link)
            case wire.Challenge():
                self._applicant.answer(frame, self._link)
            case wire.Welcome():
                if frame.segment_nbytes < wire.SEGMENT_GRAIN or frame.window_nbytes < frame.segment_nbytes:
                    raise wire.ProtocolError(f"limits that allow nothing: {frame}")
                self.welcome = frame
                self._link.decoder.expected = wire.SERVER_FRAMES
            case wire.Refuse():
                raise wire.ProtocolError(f"it refuses this client: {frame.reason}")


def wait_for_all(works: Sequence[AggregationWork]) -> None:
    """Block until works at several aggregators are over; all connections move at once.

    Raises:
        AggregationError: of the first that fails.
    """
    clients = list(dict.fromkeys(work.group.client for work in works))
    began_s = time.monotonic()
    while unfinished := [work for work in works if not work.over]:
        for work in unfinished:
            if work.group.failure is not None:
                raise work.group.failure
            if time.monotonic() >= work.deadline_s:
                raise GroupFailedError(f"no time left for {work}", wire.FailCode.TIMEOUT, None, work.sequence)
        waiting = select.poll()
        moved = [client.advance(began_s, waiting) for client in clients]
        if not any(moved):
            waiting.poll(1000 * _LOOK_S)
