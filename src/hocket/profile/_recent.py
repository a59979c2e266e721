"""The last operations of this process, one by one; nothing is added up, so that listening costs next to nothing."""

from __future__ import annotations

from collections import deque

from hocket.comm import Operation

from ._intervals import Interval
from ._listener import Listener


class Recent(Listener):
    """Keeps the last operations, and when the user's thread waited; an operation costs two appends.

    Args:
        keep: how many of each.
    """

    def __init__(self, keep: int) -> None:
        super().__init__()
        self._operations: deque[Operation] = deque(maxlen=keep)
        self._waits: deque[Interval] = deque(maxlen=keep)

    def operation_finished(self, op: Operation) -> None:
        """See hocket.comm.Observer."""
        self._operations.append(op)

    def operation_waited(self, op: Operation, begin_s: float, end_s: float) -> None:
        """See hocket.comm.Observer."""
        self._waits.append((begin_s, end_s))

    def operations(self) -> list[Operation]:
        """The last operations, in the order in which they finished."""
        return list(self._operations)

    def waits(self) -> list[Interval]:
        """When the user's thread was blocked on an operation, of late: begin and end in perf_counter seconds."""
        return list(self._waits)
