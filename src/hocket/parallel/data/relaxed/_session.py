"""Training that workers leave together: a `with` block at whose end all meet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Session(ABC):
    """Settles at the end of its `with` block, or tells the others that it has failed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.settle()
        self.close(failed=kind is not None)

    @abstractmethod
    def settle(self) -> None:
        """Waits for all workers, whose parameters are the same then; a collective operation."""

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """Leaves the others, with a model of one's own."""
