"""A member's side of a group: operations begun in order, their pieces sent as credits allow, results put in place."""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from . import _frames as wire
from ._errors import AggregatorLostError, GroupFailedError
from ._kinds import COMMITTED, IN_BLOCKS, REDUCING, ElementType, Kind, Operator
from ._link import FrameLink
from ._pool import Array

_IN_FLIGHT: Final = 4
"""So many pieces fit into a window at least: one is on its way, one is reduced, one comes back."""
AHEAD_NBYTES: Final = 128 << 10
"""So much is given to the socket at a time. Then others may go first: a rank of the same host that has not begun yet,
and for whose first piece all will wait, say; and what is behind it can still be sorted fairly among groups."""
_SERVER_SHARE: Final = 0.9
"""Of an operation's time the aggregator gets so much, and so is the first to give up: it knows for whom it waits."""


_LEAST_SEGMENT_NBYTES: Final = 16 << 10
_USUAL_SEGMENT_NBYTES: Final = 512 << 10
_SEGMENTS: Final = 128


def segment_nbytes(block_nbytes: int, most: int = wire.MOST_SEGMENT_NBYTES) -> int:
    """In which pieces a block travels: a 128th of it, so that little time passes before the first piece is reduced.

    The aggregator adds the time of one piece to that of the whole; pieces of 8 KiB and less cost it more than they
    gain, also on links of 100 Mbit/s, and pieces of 512 KiB and more gain nothing.
    """
    wanted = -(-block_nbytes // _SEGMENTS // wire.SEGMENT_GRAIN) * wire.SEGMENT_GRAIN
    return min(
        max(wanted, _LEAST_SEGMENT_NBYTES), _USUAL_SEGMENT_NBYTES, most // wire.SEGMENT_GRAIN * wire.SEGMENT_GRAIN
    )


class GroupClient(Protocol):
    """The connection that moves a group's bytes: `AggregationClient`, which is made of groups."""

    lock: threading.RLock
    error: AggregatorLostError | None
    welcome: wire.Welcome | None

    def drive(self, finished: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Move bytes until `finished()`."""

    def forget(self, group: AggregationGroup, handle: int) -> None:
        """Move bytes for a group no more."""

    def advance(self, began_s: float, waiting: select.poll) -> bool:
        """Move what can be moved now; if that is nothing, register in `waiting` what must be waited for."""


class AggregationGroup:
    """A member's view of a group; made by `AggregationClient.join`."""

    def __init__(self, client: GroupClient, handle: int, total: int, position: int) -> None:
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
        """Block until all members have come.

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
            raise GroupFailedError(str(error), wire.FailCode.TIMEOUT, None, 0) from None
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
        """Begin an operation; all members post the same ones in the same order.

        Args:
            kind: Kind of operation.
            send: This member's contribution as flat uint8, unchanged until the work is over; None if it has none.
            receive: Where the result goes, flat uint8, not the memory of `send`; None if nothing comes here.
            operator: How contributions are combined.
            element: Type of the elements.
            root: Position of the root.
            timeout_s: Seconds until the operation fails for all.
            segment: Bytes of the pieces in which blocks travel; by default `segment_nbytes` chooses.

        Raises:
            AggregationError: the group is over.
        """
        client = self._client
        with client.lock:
            if self.failure is not None:
                raise self.failure
            if client.error is not None:
                raise client.error
            welcome = client.welcome
            assert welcome is not None
            self._sequence += 1
            work = AggregationWork(self, kind, self._sequence, send, receive, root, timeout_s)
            most = min(welcome.segment_nbytes, max(wire.SEGMENT_GRAIN, welcome.window_nbytes // _IN_FLIGHT))
            piece = segment or segment_nbytes(work.block_nbytes, most)
            work.segment_nbytes = piece
            deadline_ms = max(1, min(int(timeout_s * 1000 * _SERVER_SHARE), (1 << 32) - 1))
            if self._sequence == 1:
                self._credit_nbytes = welcome.window_nbytes
            work.request = wire.Open(
                self._handle, self._sequence, kind, operator, element, root, work.nbytes, piece, deadline_ms
            )
            self._under_way[self._sequence] = work
            self._to_send.append(work)
            return work

    def leave(self) -> None:
        """Take part no more; the connection stays."""
        self._client.forget(self, self._handle)

    def wait_for(self, work: AggregationWork) -> None:
        """Block until a work is over, and raise what ended it."""
        try:
            self._client.drive(lambda: work.over or self.failure is not None, work.deadline_s, f"for {work}")
        except TimeoutError as error:
            raise GroupFailedError(str(error), wire.FailCode.TIMEOUT, None, work.sequence) from None
        if not work.over:
            assert self.failure is not None
            raise self.failure

    @property
    def client(self) -> GroupClient:
        """The connection."""
        return self._client

    # --- called by the client while it drives -------------------------------------------------------------------------

    @property
    def awaited_nbytes(self) -> int:
        """What comes of the oldest operation without a further word from this member."""
        work = next(iter(self._under_way.values()), None)
        return work.sent_nbytes - work.arrived_nbytes if work is not None and work.kind == Kind.ALL_REDUCE else 1

    def feed(self, link: FrameLink) -> int:
        """Queue what may be sent now, at most AHEAD_NBYTES; return how many bytes that was."""
        queued = 0
        welcome = self._client.welcome
        if not self._to_send or self.failure is not None or welcome is None or not self.generation:
            return 0
        while self._to_send and queued < AHEAD_NBYTES:
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

    def _sent(self, work: AggregationWork, nbytes: int, link: FrameLink) -> None:
        """Note that the socket has taken a piece."""
        work.sent_nbytes += nbytes
        self._advance(work, link)

    def place(self, data: wire.Data) -> memoryview:
        """Return where a segment of a result shall lie.

        Raises:
            ProtocolError: no such segment is expected.
        """
        work = self._under_way.get(data.sequence)
        if work is None or work.receive is None:
            raise wire.ProtocolError(f"a segment of operation {data.sequence}, which expects none")
        begin = data.offset - work.receive_base
        if begin < 0 or begin + data.nbytes > work.receive.nbytes or data.nbytes > work.to_come_nbytes:
            raise wire.ProtocolError(f"bytes {data.offset}:{data.offset + data.nbytes} of operation {data.sequence}")
        work.to_come_nbytes -= data.nbytes
        return work.receive.data[begin : begin + data.nbytes]

    def handle_frame(self, frame: wire.Frame, link: FrameLink) -> None:
        """Handle one frame for this group."""
        match frame:
            case wire.Data():
                work = self._under_way.get(frame.sequence)
                if work is not None:
                    work.arrived_nbytes += frame.nbytes
                    self._advance(work, link)
            case wire.Credit():
                self._credit_nbytes += frame.nbytes
            case wire.Done():
                work = self._under_way.pop(frame.sequence, None)
                if work is not None:
                    work.over = True
            case wire.Joined():
                self.generation = frame.generation
            case wire.Fail():
                member = None if frame.member == wire.NOBODY else frame.member
                self.failure = GroupFailedError(frame.reason, frame.code, member, frame.sequence)

    def _advance(self, work: AggregationWork, link: FrameLink) -> None:
        """After a work has sent or received something."""
        given = 0 if work.send is None else work.send.nbytes
        if not work.begun or work.sent_nbytes < given or work.arrived_nbytes < work.expected_nbytes:
            return
        if work.kind in COMMITTED:
            if not work.acknowledged:
                work.acknowledged = True
                link.send(wire.Ack(self._handle, work.sequence))
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
        self.request: wire.Open | None = None
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
        """Return the bytes of the next piece to queue; 0 if all are queued."""
        if self.send is None or self.queued_nbytes >= self.send.nbytes:
            return 0
        return min(self.segment_nbytes, self.block_nbytes - self.queued_nbytes % self.block_nbytes)

    def wait(self) -> None:
        """Block until the operation is over.

        Raises:
            AggregatorLostError: the aggregator is gone; nothing is known about other members.
            GroupFailedError: the aggregator says that the group is over.
        """
        self._group.wait_for(self)

    @property
    def may_be_over(self) -> bool:
        """Whether this member has done all that the others need for the end of it."""
        sent = self.send is None or self.queued_nbytes >= self.send.nbytes
        return self.begun and sent and (self.acknowledged or self.kind not in COMMITTED)

    @property
    def group(self) -> AggregationGroup:
        """Whose work it is."""
        return self._group

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} {self.sequence} of {self.nbytes} bytes"
