"""What a `TagMatcher` handles: sends and receives, and what is on its way from one peer."""

from collections import deque
from datetime import timedelta
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from ..shm import DTYPE_NUMBERS, DTYPES
from ..transport import flatten, write_back
from ._shm_streams import ShmStreams, StreamTransfer

ANY: Final = -1
"""The peer of a receive that takes from whoever sends first, until one has."""
_HEAD_WORDS: Final = 3  # tag, bytes, element type


def described(nbytes: int, form: int) -> str:
    """Return what messages call so many bytes of an element type, by its number."""
    return f"{nbytes} bytes of {str(DTYPES[form]).removeprefix('torch.')}"


class RequestOwner(Protocol):
    """The `TagMatcher` that a request was posted to."""

    def number(self, rank: int) -> int:
        """Return a rank's number in the world."""

    def wait(self, request: "TaggedRequest", timeout_s: float | None) -> None:
        """Block until the request is over."""

    def look(self, request: "TaggedRequest") -> bool:
        """Move what can move; say whether the request is over."""

    def end(self, request: "TaggedRequest", error: BaseException | None) -> None:
        """Finish the request; with the lock held."""


class TaggedRequest(Work):
    """A send or receive; torch's Work."""

    def __init__(self, matcher: RequestOwner, number: int, peer: int, tag: int, tensor: Tensor, receives: bool) -> None:
        super().__init__()
        self.number = number
        self.peer = peer
        self.tag = tag
        self.tensor = tensor
        self.flat = flatten(tensor)
        self.receives = receives
        self.message: StreamTransfer | None = None
        self.over = False
        self.error: BaseException | None = None
        self._matcher = matcher

    @property
    def form(self) -> int:
        """Number of the element type."""
        return DTYPE_NUMBERS[self.flat.dtype]

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.flat.numel() * self.flat.element_size()

    def __str__(self) -> str:
        who = "any rank" if self.peer == ANY else f"rank {self._matcher.number(self.peer)}"
        verb = "recv from" if self.receives else "send to"
        return f"{verb} {who} of {described(self.nbytes, self.form)} with tag {self.tag}"

    def finish(self, error: BaseException | None = None) -> None:
        """Mark it as over; with the lock held."""
        if self.receives and error is None:
            write_back(self.flat, self.tensor)
        self.error = error
        self.over = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message has passed.

        Raises:
            CollectiveTimeoutError: it has not in time.
            PeerDiedError: the peer has ended.
            CollectiveMismatchError: sender and receiver mean messages of different lengths or types.
        """
        self._matcher.wait(
            self, timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else None
        )
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return self.over or self._matcher.look(self)

    def is_success(self) -> bool:
        """Return whether it is over and went well."""
        return self.over and self.error is None

    def result(self) -> list[Tensor]:
        """Return the tensor."""
        return [self.tensor]

    def _source_rank(self) -> int:
        return self.peer


class UnexpectedCopy(TaggedRequest):
    """A receive posted while its message was already coming to another place: copies when that is complete."""

    def __init__(self, matcher: RequestOwner, request: TaggedRequest, data: Tensor) -> None:
        super().__init__(matcher, request.number, request.peer, request.tag, data, receives=False)
        self._for = request
        self._data = data

    def finish(self, error: BaseException | None = None) -> None:
        """Hand the message over."""
        if error is None:
            self._for.flat.view(torch.uint8).copy_(self._data)
        self._matcher.end(self._for, error)
        self.over = True


class EmptyBody:
    """A body without bytes."""

    left = 0


class UnexpectedMessage(NamedTuple):
    """What has come, or is coming, with a tag that nobody waits for."""

    tag: int
    form: int
    data: Tensor
    message: StreamTransfer | EmptyBody


class PeerQueues:
    """What comes from one peer."""

    def __init__(self, streams: ShmStreams, rank: int) -> None:
        self.rank = rank
        self.posted: deque[TaggedRequest] = deque()
        self.unexpected: deque[UnexpectedMessage] = deque()
        self.body: StreamTransfer | EmptyBody | None = None
        self.request: TaggedRequest | None = None
        self.wrong = ""
        self.head = torch.zeros(_HEAD_WORDS, dtype=torch.int64)
        self.head_message = streams.receive(self.head, rank)
