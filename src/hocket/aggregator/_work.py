"""A client's operation under way: what it sends and awaits, in which pieces, and the wait for it."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ._errors import GroupFailedError
from ._frames import MOST_SEGMENT_NBYTES, SEGMENT_GRAIN, FailCode, Open
from ._kinds import IN_BLOCKS, REDUCING, Kind
from ._pool import Array

if TYPE_CHECKING:
    from ._membership import AggregationGroup

_LEAST_SEGMENT_NBYTES: Final = 16 << 10
_USUAL_SEGMENT_NBYTES: Final = 512 << 10
_SEGMENTS: Final = 128
_LOOK_S: Final = 0.05
"""How long several connections may stay quiet before deadlines and failures are looked at again."""


def segment_nbytes(block_nbytes: int, most: int = MOST_SEGMENT_NBYTES) -> int:
    """In which pieces a block travels: a 128th of it, so that little time passes before the first piece is reduced.

    The aggregator adds the time of one piece to that of the whole; pieces of 8 KiB and less cost it more than they
    gain, also on links of 100 Mbit/s, and pieces of 512 KiB and more gain nothing.
    """
    wanted = -(-block_nbytes // _SEGMENTS // SEGMENT_GRAIN) * SEGMENT_GRAIN
    return min(max(wanted, _LEAST_SEGMENT_NBYTES), _USUAL_SEGMENT_NBYTES, most // SEGMENT_GRAIN * SEGMENT_GRAIN)


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
