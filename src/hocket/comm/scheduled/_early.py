"""Messages of an operation that begins before its ranks have heard whether they all mean the same.

Their tag follows from what the rank is about to do. So nothing that another operation sends can arrive in their place,
and those which nobody answers stay where they are. Before anything is waited for, hence before anything of a user's is
changed, all ranks have agreed.
"""

import zlib
from collections.abc import Callable
from typing import Final, Protocol

from torch import Tensor

from ..transport import CommError
from ._execute import NotAgreedError, PendingMessage, PointToPoint

_TAGS: Final = 1 << 30
"""The first tag of operations; users' are below. As many follow, less those of messages between two ranks."""


class TaggedPoints(PointToPoint, Protocol):
    """Point-to-point whose messages carry a tag, and meet those of the same tag only."""

    tag: int


class EarlyPoints:
    """See the head of this module; a `PointToPoint`.

    Args:
        points: Messages to the other ranks.
    """

    def __init__(self, points: TaggedPoints) -> None:
        self.name = points.name
        self._point_to_point = points
        self._agree: Callable[[float], object] | None = None
        self._begun: list[PendingMessage] = []
        self._abandoned: list[PendingMessage] = []  # the engine has the addresses of their tensors

    def begin(self, contract: bytes, agree: Callable[[float], object] | None = None) -> None:
        """Begin an operation; `agree`, unless it is None, is to be called before anything is waited for."""
        self._point_to_point.tag = _TAGS | zlib.crc32(contract) & (_TAGS // 2 - 1)
        self._agree = agree

    def agree(self, timeout_s: float) -> None:
        """Wait until all ranks are known to agree, unless that has been done.

        Raises:
            NotAgreedError: They do not.
        """
        if self._agree is None:
            return
        agree, self._agree = self._agree, None
        begun, self._begun = self._begun, []
        try:
            agree(timeout_s)
        except CommError as error:
            self._abandoned += begun
            raise NotAgreedError(error) from error

    def send(self, flat: Tensor, peer: int) -> PendingMessage:
        return self._keep(self._point_to_point.send(flat, peer))

    def receive(self, flat: Tensor, peer: int) -> PendingMessage:
        return self._keep(self._point_to_point.receive(flat, peer))

    def _keep(self, message: PendingMessage) -> PendingMessage:
        if self._agree is None:
            return message
        self._begun.append(message)
        return _EarlyMessage(self, message)


class _EarlyMessage:
    """A `PendingMessage` that was begun before the ranks had agreed."""

    __slots__ = ("_message", "_points")

    def __init__(self, points: EarlyPoints, message: PendingMessage) -> None:
        self._points = points
        self._message = message

    def done(self) -> bool:
        return False

    def wait(self, timeout_s: float) -> None:
        self._points.agree(timeout_s)
        self._message.wait(timeout_s)
