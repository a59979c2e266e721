"""What listens to the operations of this process, between `start` and `stop` or inside a `with` block."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from hocket import comm
from hocket.comm import OperationRecord

Interval = tuple[float, float]
"""Begin and end, in perf_counter seconds."""


class OperationListener(ABC):
    """Is told of each operation; see hocket.comm.Observer."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None

    @abstractmethod
    def operation_finished(self, op: OperationRecord) -> None:
        """See hocket.comm.Observer."""

    @abstractmethod
    def operation_waited(self, op: OperationRecord, begin_s: float, end_s: float) -> None:
        """See hocket.comm.Observer."""

    def start(self) -> None:
        """Begin to listen; what was recorded before stays."""
        if self._stop is None:
            self._stop = comm.observe(self)

    def stop(self) -> None:
        """End listening."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
