"""The client's side: one connection, groups on it, and operations that stream both ways at once. No torch here."""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from ._frames import (
    MOST_SEGMENT_NBYTES,
    NEWEST_VERSION,
    NOBODY,
    NONCE_NBYTES,
    OLDEST_VERSION,
    SEGMENT_GRAIN,
    SERVER_FRAMES,
    Ack,
    Challenge,
    Credit,
    Data,
    Done,
    Fail,
    FailCode,
    Frame,
    FrameType,
    Hello,
    Join,
    Joined,
    Leave,
    Level,
    Open,
    Ping,
    Pong,
    Proof,
    ProtocolError,
    Refuse,
    Welcome,
)
from ._handshake import key_of, prove, same
from ._kinds import COMMITTED, IN_BLOCKS, REDUCING, ElementType, Kind, Operator
from ._link import Link, prepare
from ._pool import Array

_LEAST_SEGMENT_NBYTES: Final = 16 << 10
_USUAL_SEGMENT_NBYTES: Final = 512 << 10
_SEGMENTS: Final = 128
_IN_FLIGHT: Final = 4
"""So many pieces fit into a window at least: one is on its way, one is reduced, one comes back."""
_LOOK_S: Final = 0.05
_AWAIT_S: Final = 0.02
"""While the kernel wakes this process for many bytes only, it looks itself so often: for a failure, which is few."""
_FAREWELL_S: Final = 0.5
_AHEAD_NBYTES: Final = 128 << 10
"""So much is given to the socket at a time. Then others may go first: a rank of the same host that has not begun yet,
and for whose first piece all will wait, say; and what is behind it can still be sorted fairly among groups."""
_SERVER_SHARE: Final = 0.9
"""Of an operation's time the aggregator gets so much, and so is the first to give up: it knows for whom it waits."""


class AggregationError(Exception):
    """An operation could not be done by the aggregator."""


class AggregatorLostError(AggregationError):
    """The aggregator is gone, does not answer, or does not let this client in."""


class GroupFailedError(AggregationError):
    """The group is over.

    Attributes:
        code: why.
        member: the position of the member that caused it, or None.
        sequence: the operation that it ended, or 0.
    """

    def __init__(self, message: str, code: FailCode, member: int | None, sequence: int) -> None:
        super().__init__(message)
        self.code = code
        self.member = member
        self.sequence = sequence


def segment_nbytes(block_nbytes: int, most: int = MOST_SEGMENT_NBYTES) -> int:
    """In which pieces a block travels: a 128th of it, so that little time passes before the first piece is reduced.

    The aggregator adds the time of one piece to that of the whole; pieces of 8 KiB and less cost it more than they
    gain, also on links of 100 Mbit/s, and pieces of 512 KiB and more gain nothing.
    """
    wanted = -(-block_nbytes // _SEGMENTS // SEGMENT_GRAIN) * SEGMENT_GRAIN
    return min(max(wanted, _LEAST_SEGMENT_NBYTES), _USUAL_SEGMENT_NBYTES, most // SEGMENT_GRAIN * SEGMENT_GRAIN)


class AggregationClient:
    """A connection to an aggregator; safe to use from several threads.

    Args:
        address: host and port.
        token: the job's.
        timeout_s: for connecting and proving.
        stall_s: seconds of silence, answers to pings included, after which the aggregator counts as lost.

    Raises:
        AggregatorLostError: it cannot be reached, does not hold the token, or refuses.
    """

    def __init__(self, address: tuple[str, int], token: bytes, *, timeout_s: float = 5.0, stall_s: float = 5.0) -> None:
        self._where = f"aggregator {address[0]}:{address[1]}"
        self._token = token
        self._stall_s = stall_s
        self._lock = threading.RLock()
        self._groups: dict[int, AggregationGroup] = {}
        self._handle = 0
        self._error: AggregatorLostError | None = None
        self._nonce = secrets.token_bytes(NONCE_NBYTES)
        self._pinged_s = 0.0
        try:
            sock = socket.create_connection(address, timeout_s)
        except OSError as error:
            raise AggregatorLostError(f"{self._where} cannot be reached: {error}") from None
        prepare(sock, max(stall_s, 1.0))
        self._link = Link(sock, frozenset({FrameType.CHALLENGE, FrameType.REFUSE}), MOST_SEGMENT_NBYTES)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._interest = select.POLLIN
        self.welcome: Welcome | None = None
        self._link.send(Hello(OLDEST_VERSION, NEWEST_VERSION, key_of(token), self._nonce))
        try:
            self.drive(lambda: self.welcome is not None, time.monotonic() + timeout_s, "to be let in")
        except AggregationError:
            self.close()
            raise

    def join(
        self, name: str, total: int, position: int, *, levels: Sequence[Level] | None = None, label: str = ""
    ) -> AggregationGroup:
        """Takes part in a group; `AggregationGroup.wait` blocks until all members have come.

        Args:
            name: of the group; all members give the same.
            total: how many members it has.
            position: of this one.
            levels: the way up the tree, this aggregator's level first; by default all members are its children.
            label: how errors call this member.
        """
        with self._lock:
            self._handle += 1
            levels = levels or (Level(total, position, position, 1),)
            group = AggregationGroup(self, self._handle, total, position)
            self._groups[self._handle] = group
            text = (label or f"member {position}").encode()[:200]
            self._link.send(Join(self._handle, total, tuple(levels), name.encode(), text))
            self._pump()
            return group

    def close(self) -> None:
        """Leaves: other members' operations with this one fail."""
        for group in list(self._groups.values()):
            group.leave()
        if self._error is None:
            self._error = AggregatorLostError(f"the connection to {self._where} was closed")
            self._bid_farewell()
        self._link.sock.close()

    def _bid_farewell(self) -> None:
        """Closing a socket in which something is unread throws away what it has still to send."""
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
        """Takes in what has come while nobody waited, without blocking.

        Raises:
            AggregatorLostError: the connection is gone.
        """
        with self._lock:
            self._step(time.monotonic(), 0.0)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes sent and received."""
        return self._link.sent_nbytes, self._link.received_nbytes

    # --- inside -------------------------------------------------------------------------------------------------------

    def drive(self, finished: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Moves bytes until `finished()`.

        Raises:
            AggregatorLostError: the connection is gone, or silent for too long.
            TimeoutError: `deadline_s` has passed.
        """
        began_s = time.monotonic()
        while not finished():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._lock.acquire(timeout=left_s):
                raise TimeoutError(f"{self._where}: no time left {what}")
            try:
                if not finished():
                    self._step(began_s, left_s)
            finally:
                self._lock.release()

    def advance(self, began_s: float, waiting: select.poll) -> bool:
        """Moves what can be moved now; if that is nothing, registers in `waiting` what must be waited for."""
        with self._lock:
            if self._step(began_s, 0.0):
                return True
            waiting.register(self._link.sock, self._interest)
            return False

    def _step(self, began_s: float, wait_s: float) -> bool:
        """Sends and receives what it can, and waits up to `wait_s` for that.

        Args:
            began_s: when somebody began to wait: silence before that is nobody's fault.
            wait_s: 0 to look only.

        Returns:
            Whether anything came, or may be sent now.
        """
        if self._error is not None:
            raise self._error
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
                self._link.send(Ping(0))
                self._link.flush()
            return False
        except (OSError, EOFError, ProtocolError) as error:
            self._error = AggregatorLostError(f"{self._where} is lost: {error or type(error).__name__}")
            self._link.sock.close()
            raise self._error from None

    def _awaited_nbytes(self) -> int:
        """For how many bytes at least it is worth to wake: those that come in any case."""
        if self._link.waiting or len(self._groups) > 1:
            return 1
        decoder = self._link.decoder
        to_come_nbytes = sum(group.awaited_nbytes for group in self._groups.values()) - decoder.begun_nbytes
        return max(to_come_nbytes, decoder.missing_nbytes)

    def _pump(self) -> None:
        """Queues as much as windows allow, in turns among groups, and sends what the socket takes."""
        link = self._link
        while True:  # until windows are used up, at the latest
            queued = sum(group.feed(link) for group in list(self._groups.values()))
            link.flush()
            if link.waiting or not queued:
                return
            if queued >= _AHEAD_NBYTES:
                os.sched_yield()

    def _place(self, data: Data) -> memoryview:
        group = self._groups.get(data.group)
        if group is None or group.failure is not None:
            return memoryview(bytearray(data.nbytes))
        return group.place(data)

    def _handle_frame(self, frame: Frame) -> None:
        match frame:
            case Ping():
                self._link.send(Pong(frame.number))
            case Joined() | Data() | Credit() | Done() | Fail():
                group = self._groups.get(frame.group)
                if group is not None:
                    group.handle_frame(frame, self._link)
            case Challenge():
                self._answer(frame)
            case Welcome():
                if frame.segment_nbytes < SEGMENT_GRAIN or frame.window_nbytes < frame.segment_nbytes:
                    raise ProtocolError(f"limits that allow nothing: {frame}")
                self.welcome = frame
                self._link.decoder.expected = SERVER_FRAMES
            case Refuse():
                raise ProtocolError(f"it refuses this client: {frame.reason}")

    def _answer(self, challenge: Challenge) -> None:
        version, theirs = challenge.version, challenge.nonce
        if not OLDEST_VERSION <= version <= NEWEST_VERSION:
            raise ProtocolError(f"it chose version {version} of the protocol")
        if not same(challenge.proof, prove(self._token, b"server", version, self._nonce, theirs)):
            raise ProtocolError("it does not hold the token")
        self._link.send(Proof(prove(self._token, b"client", version, self._nonce, theirs)))
        self._link.decoder.expected = frozenset({FrameType.WELCOME, FrameType.REFUSE})


class AggregationGroup:
    """A member's view of a group; made by `AggregationClient.join`."""

    def __init__(self, client: AggregationClient, handle: int, total: int, position: int) -> None:
        self._client = client
        self._handle = handle
        self.total = total
        self.position = position
        self.generation = 0
        self.failure: GroupFailedError | None = None
        self._sequence = 0
        self._credit_nbytes = 0
        self._under_way: dict[int, AggregationWork] = {}
        self._to_send: deque[AggregationWork] = deque()

    def wait(self, timeout_s: float) -> None:
        """Blocks until all members have come.

        Raises:
            AggregationError: the aggregator is lost, or the group has failed.
        """
        try:
            self._client.drive(
                lambda: self.generation != 0 or self.failure is not None,
                time.monotonic() + timeout_s,
                "for all members to come",
            )
        except TimeoutError as error:
            raise GroupFailedError(str(error), FailCode.TIMEOUT, None, 0) from None
        if self.failure is not None:
            raise self.failure

    def post(
        self,
        kind: Kind,
        send: Array | None,
        receive: Array | None,
        *,
        operator: Operator = Operator.NONE,
        element: ElementType = ElementType.UINT8,
        root: int = 0,
        timeout_s: float = 60.0,
        segment: int | None = None,
    ) -> AggregationWork:
        """Begins an operation; all members post the same ones in the same order.

        Args:
            kind: what to do.
            send: this member's contribution as flat uint8, unchanged until the work is over; None if it has none.
            receive: where the result goes, flat uint8, not the memory of `send`; None if nothing comes here.
            operator: how contributions are combined.
            element: their type.
            root: a position.
            timeout_s: until the operation fails for all.
            segment: bytes of the pieces in which blocks travel; by default `segment_nbytes` chooses.

        Raises:
            AggregationError: the group is over.
        """
        client = self._client
        with client._lock:
            if self.failure is not None:
                raise self.failure
            if client._error is not None:
                raise client._error
            welcome = client.welcome
            assert welcome is not None
            self._sequence += 1
            work = AggregationWork(self, kind, self._sequence, send, receive, root, timeout_s)
            most = min(welcome.segment_nbytes, max(SEGMENT_GRAIN, welcome.window_nbytes // _IN_FLIGHT))
            piece = segment or segment_nbytes(work.block_nbytes, most)
            work.segment_nbytes = piece
            deadline_ms = max(1, min(int(timeout_s * 1000 * _SERVER_SHARE), (1 << 32) - 1))
            if self._sequence == 1:
                self._credit_nbytes = welcome.window_nbytes
            work.request = Open(
                self._handle, self._sequence, kind, operator, element, root, work.nbytes, piece, deadline_ms
            )
            self._under_way[self._sequence] = work
            self._to_send.append(work)
            return work

    def leave(self) -> None:
        """Takes part no more; the connection stays."""
        client = self._client
        with client._lock:
            if client._groups.pop(self._handle, None) is not None and self.failure is None and client._error is None:
                client._link.send(Leave(self._handle))
                try:
                    client._link.flush()
                except OSError:
                    return

    def wait_for(self, work: AggregationWork) -> None:
        """Blocks until a work is over; raises what ended it."""
        try:
            self._client.drive(lambda: work.over or self.failure is not None, work.deadline_s, f"for {work}")
        except TimeoutError as error:
            raise GroupFailedError(str(error), FailCode.TIMEOUT, None, work.sequence) from None
        if not work.over:
            assert self.failure is not None
            raise self.failure

    @property
    def client(self) -> AggregationClient:
        """The connection."""
        return self._client

    # --- called by the client while it drives -------------------------------------------------------------------------

    @property
    def awaited_nbytes(self) -> int:
        """What comes of the oldest operation without a further word from this member."""
        work = next(iter(self._under_way.values()), None)
        return work.sent_nbytes - work.arrived_nbytes if work is not None and work.kind == Kind.ALL_REDUCE else 1

    def feed(self, link: Link) -> int:
        """Queues what may be sent now, at most _AHEAD_NBYTES; returns how many bytes that was."""
        queued = 0
        welcome = self._client.welcome
        if not self._to_send or self.failure is not None or welcome is None or not self.generation:
            return 0
        while self._to_send and queued < _AHEAD_NBYTES:
            work = self._to_send[0]
            if not work.begun:
                if len(self._under_way) > welcome.operations and work.sequence >= (
                    min(self._under_way) + welcome.operations
                ):
                    break
                work.begun = True
                assert work.request is not None
                link.send(work.request)
            nbytes = work.next_nbytes()
            if nbytes:
                if nbytes > self._credit_nbytes:
                    break
                self._credit_nbytes -= nbytes
                queued += nbytes
                assert work.send is not None
                at = work.queued_nbytes
                piece = work.send[at : at + nbytes]
                link.send_data(
                    self._handle, work.sequence, work.send_base + at, piece, partial(self._sent, work, nbytes, link)
                )
                work.queued_nbytes += nbytes
                continue
            self._to_send.popleft()
            self._advance(work, link)
        return queued

    def _sent(self, work: AggregationWork, nbytes: int, link: Link) -> None:
        """The socket has taken a piece."""
        work.sent_nbytes += nbytes
        self._advance(work, link)

    def place(self, data: Data) -> memoryview:
        """Where a segment of a result shall lie.

        Raises:
            ProtocolError: no such segment is expected.
        """
        work = self._under_way.get(data.sequence)
        if work is None or work.receive is None:
            raise ProtocolError(f"a segment of operation {data.sequence}, which expects none")
        begin = data.offset - work.receive_base
        if begin < 0 or begin + data.nbytes > work.receive.nbytes or data.nbytes > work.to_come_nbytes:
            raise ProtocolError(f"bytes {data.offset}:{data.offset + data.nbytes} of operation {data.sequence}")
        work.to_come_nbytes -= data.nbytes
        return work.receive.data[begin : begin + data.nbytes]

    def handle_frame(self, frame: Frame, link: Link) -> None:
        """One frame for this group."""
        match frame:
            case Data():
                work = self._under_way.get(frame.sequence)
                if work is not None:
                    work.arrived_nbytes += frame.nbytes
                    self._advance(work, link)
            case Credit():
                self._credit_nbytes += frame.nbytes
            case Done():
                work = self._under_way.pop(frame.sequence, None)
                if work is not None:
                    work.over = True
            case Joined():
                self.generation = frame.generation
            case Fail():
                member = None if frame.member == NOBODY else frame.member
                self.failure = GroupFailedError(frame.reason, frame.code, member, frame.sequence)

    def _advance(self, work: AggregationWork, link: Link) -> None:
        """After a work has sent or received something."""
        given = 0 if work.send is None else work.send.nbytes
        if not work.begun or work.sent_nbytes < given or work.arrived_nbytes < work.expected_nbytes:
            return
        if work.kind in COMMITTED:
            if not work.acknowledged:
                work.acknowledged = True
                link.send(Ack(self._handle, work.sequence))
        elif work.kind != Kind.BARRIER:
            work.over = True
            self._under_way.pop(work.sequence, None)


class AggregationWork:
    """An operation under way; made by `AggregationGroup.post`."""

    def __init__(
        self,
        group: AggregationGroup,
        kind: Kind,
        sequence: int,
        send: Array | None,
        receive: Array | None,
        root: int,
        timeout_s: float,
    ) -> None:
        self.kind = kind
        self.sequence = sequence
        self.send = send
        self.receive = receive
        self.deadline_s = time.monotonic() + timeout_s
        self.request: Open | None = None
        self.segment_nbytes = 0
        self.begun = False
        self.acknowledged = False
        self.over = False
        self.queued_nbytes = 0
        self.sent_nbytes = 0
        self.arrived_nbytes = 0
        self._group = group
        given = 0 if send is None else send.nbytes
        wanted = 0 if receive is None else receive.nbytes
        me, total = group.position, group.total
        self.nbytes = given if kind in REDUCING else max(given, wanted)
        self.block_nbytes = self.nbytes // total if kind in IN_BLOCKS else self.nbytes
        own = me * self.block_nbytes
        self.send_base = own if kind == Kind.ALL_GATHER else 0
        self.receive_base = own if kind == Kind.REDUCE_SCATTER else 0
        self.expected_nbytes = wanted - (self.block_nbytes if kind == Kind.ALL_GATHER else 0)
        self.to_come_nbytes = self.expected_nbytes

    def next_nbytes(self) -> int:
        """Bytes of the next piece to queue; 0 if all are queued."""
        if self.send is None or self.queued_nbytes >= self.send.nbytes:
            return 0
        return min(self.segment_nbytes, self.block_nbytes - self.queued_nbytes % self.block_nbytes)

    def wait(self) -> None:
        """Blocks until the operation is over.

        Raises:
            AggregatorLostError: the aggregator is gone; nothing is known about other members.
            GroupFailedError: the aggregator says that the group is over.
        """
        self._group.wait_for(self)

    @property
    def group(self) -> AggregationGroup:
        """Whose work it is."""
        return self._group

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} {self.sequence} of {self.nbytes} bytes"


def wait_for_all(works: Sequence[AggregationWork]) -> None:
    """Blocks until works at several aggregators are over; all connections move at once.

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
                raise GroupFailedError(f"no time left for {work}", FailCode.TIMEOUT, None, work.sequence)
        waiting = select.poll()
        moved = [client.advance(began_s, waiting) for client in clients]
        if not any(moved):
            waiting.poll(1000 * _LOOK_S)
