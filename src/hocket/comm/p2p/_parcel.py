"""What a `Postbox` handles: sends and receives, and what is on its way from one peer."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.distributed import Work

from ..transport import flatten, write_back
from ._mailbox import Mailbox, Message

if TYPE_CHECKING:
    from ._postbox import Postbox

Tensor = torch.Tensor

ANY: Final = -1
"""The peer of a receive that takes from whoever sends first, until one has."""
_HEAD_WORDS: Final = 2


class Parcel(Work):
    """A send or receive; torch's Work."""

    def __init__(self, box: Postbox, number: int, peer: int, tag: int, tensor: Tensor, receives: bool) -> None:
        super().__init__()
        self.number = number
        self.peer = peer
        self.tag = tag
        self.tensor = tensor
        self.flat = flatten(tensor)
        self.receives = receives
        self.message: Message | None = None
        self.over = False
        self.error: BaseException | None = None
        self._box = box

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.flat.numel() * self.flat.element_size()

    def __str__(self) -> str:
        who = "any rank" if self.peer == ANY else f"rank {self._box.number(self.peer)}"
        verb = "recv from" if self.receives else "send to"
        return f"{verb} {who} of {self.nbytes} bytes with tag {self.tag}"

    def finish(self, error: BaseException | None = None) -> None:
        """Marks it as over; with the lock held."""
        if self.receives and error is None:
            write_back(self.flat, self.tensor)
        self.error = error
        self.over = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the message has passed.

        Raises:
            CollectiveTimeoutError: it has not in time.
            PeerDiedError: the peer has ended.
            CollectiveMismatchError: sender and receiver mean messages of different lengths.
        """
        self._box.wait(self, timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else None)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self.over or self._box.look(self)

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self.over and self.error is None

    def result(self) -> list[Tensor]:
        """The tensor."""
        return [self.tensor]

    def _source_rank(self) -> int:
        return self.peer


class Coming(Parcel):
    """A receive posted while its message was already coming to another place: copies when that is complete."""

    def __init__(self, box: Postbox, parcel: Parcel, data: Tensor) -> None:
        super().__init__(box, parcel.number, parcel.peer, parcel.tag, data, receives=False)
        self._for = parcel
        self._data = data

    def finish(self, error: BaseException | None = None) -> None:
        """Hands the message over."""
        if error is None:
            self._for.flat.view(torch.uint8).copy_(self._data)
        self._box.end(self._for, error)
        self.over = True


class Nothing:
    """A body without bytes."""

    left = 0


class Early(NamedTuple):
    """What has come, or is coming, with a tag that nobody waits for."""

    tag: int
    data: Tensor
    message: Message | Nothing


class Source:
    """What comes from one peer."""

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self.rank = rank
        self.waiting: deque[Parcel] = deque()
        self.early: deque[Early] = deque()
        self.body: Message | Nothing | None = None
        self.parcel: Parcel | None = None
        self.wrong = ""
        self.head = torch.zeros(_HEAD_WORDS, dtype=torch.int64)
        self.head_message = mailbox.receive(self.head, rank)
