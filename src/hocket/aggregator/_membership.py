"""A member's side of a group: operations begun in order, their pieces sent as credits allow, results put in place."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from ._errors import GroupFailedError
from ._frames import NOBODY, SEGMENT_GRAIN, Ack, Credit, Data, Done, Fail, FailCode, Frame, Joined, Open, ProtocolError
from ._kinds import COMMITTED, ElementType, Kind, Operator
from ._link import Link
from ._pool import Array
from ._work import AggregationWork, segment_nbytes

if TYPE_CHECKING:
    from ._client import AggregationClient

_IN_FLIGHT: Final = 4
"""So many pieces fit into a window at least: one is on its way, one is reduced, one comes back."""
AHEAD_NBYTES: Final = 128 << 10
"""So much is given to the socket at a time. Then others may go first: a rank of the same host that has not begun yet,
and for whose first piece all will wait, say; and what is behind it can still be sorted fairly among groups."""
_SERVER_SHARE: Final = 0.9
"""Of an operation's time the aggregator gets so much, and so is the first to give up: it knows for whom it waits."""


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
        with client.lock:
            if self.failure is not None:
                raise self.failure
            if client.error is not None:
                raise client.error
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
        self._client.forget(self, self._handle)

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
        """Queues what may be sent now, at most AHEAD_NBYTES; returns how many bytes that was."""
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
