"""Point-to-point of the engines, as the executor of schedules needs it."""

from datetime import timedelta
from typing import Any, Final

import torch

from ..scheduled import PendingMessage
from ..transport import CommError

_TAG: Final = 0x40_0000
"""Users' tags are small numbers; messages of schedules are told apart from users' sends by this one, or by others above
it."""


class EngineMessage:
    """A send or receive of one of torch's engines."""

    __slots__ = ("_peer", "_tensor", "_work")

    def __init__(self, work: Any, tensor: torch.Tensor, peer: int) -> None:
        self._work = work
        self._peer = peer
        self._tensor = tensor  # the engine has its address

    def done(self) -> bool:
        """Never known for Gloo without waiting, which then takes no time."""
        return False

    def wait(self, timeout_s: float) -> None:
        """Block until the engine is done with the tensor."""
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except Exception as error:
            raise _failed(error, self._peer) from error


def _failed(error: Exception, peer: int) -> CommError:
    failure = CommError(str(error))
    failure.peer = peer
    return failure


class EnginePointToPoint:
    """Messages through a process group of torch: Gloo or NCCL.

    Args:
        engine: The process group.
        name: Name of the engine.
        tag: Tag of the messages from now on; it may be changed, on both ends alike.
    """

    def __init__(self, engine: Any, name: str, tag: int = _TAG) -> None:
        self._engine = engine
        self.name = name
        self.tag = tag

    def send(self, flat: torch.Tensor, peer: int) -> PendingMessage:
        return self._begin(self._engine.send, flat, peer)

    def receive(self, flat: torch.Tensor, peer: int) -> PendingMessage:
        return self._begin(self._engine.recv, flat, peer)

    def _begin(self, method: Any, flat: torch.Tensor, peer: int) -> PendingMessage:
        data = flat.view(torch.uint8)
        try:
            return EngineMessage(method([data], peer, self.tag), data, peer)
        except RuntimeError as error:  # the connection has broken before
            raise _failed(error, peer) from error
