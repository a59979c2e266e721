"""send, recv and recv-any of c10d between hosts: what a message is comes before its bytes, and is compared.

Before its bytes a message has a head: element type, length, and which one it is to this rank with this tag. A short one
is whole in the head's message. The bytes of a long one have a tag that follows from the head. The receiver knows what
head to expect and posts its tensor under that tag, so that bytes come as fast as without a head, and never into another
tensor. Where receives from any rank share the tag it posts it once the head has come.
"""

import contextlib
import json
import math
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import wait
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import Work

from .. import torch_adapter as c10d
from ..shm import DTYPE_NUMBERS, DTYPES
from ..transport import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommError,
    Membership,
    PeerDiedError,
    flatten,
    write_back,
)
from ..transport import observers as _observe

_HEAD: Final = struct.Struct("<4sIQQ")  # a mark, element type, elements; how many came before it
_COMPARED: Final = struct.Struct("<4sIQ").size
_MARK: Final = b"HKp1"
_WHOLE_NBYTES: Final = 4096
_LOOK_S: Final = 0.2
_GRACE_S: Final = 1.0
_TELL_S: Final = 2.0  # for a rank in trouble to tell of it
_BODIES: Final = 3 << 29  # the first tag of bytes that follow a head; users' and collectives' are others


class HostMessages:
    """The sends and receives of one rank in a group on several hosts.

    Args:
        engine: Torch's engine that carries them.
        at: The group; its time-out is that of waits that name none, and may be changed here.
        called: How messages call each rank.
    """

    def __init__(self, engine: Any, at: Membership, called: Sequence[str]) -> None:
        self.timeout_s = at.timeout.total_seconds()
        self.engine = engine
        self.called = called
        self.name, self.rank, self.numbers = at.name, at.rank, at.numbers
        self._store = at.store
        self.abandoned: list[Any] = []
        """What waits for messages that nobody sends; the engine has its addresses."""
        self._lock = threading.Lock()
        self._counts: dict[tuple[int, int, bool], int] = {}
        self._tags_of_any: set[int] = set()

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Begin to send."""
        with self._lock:
            return HostMessage(self, tensor, peer, tag, self._count(peer, tag, False), receives=False)

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> Work:
        """Begin to receive from a rank, or from whichever sends first."""
        with self._lock:
            if peer is None:
                self._tags_of_any.add(tag)
            number = None if peer is None or tag in self._tags_of_any else self._count(peer, tag, True)
            return HostMessage(self, tensor, peer, tag, number, receives=True)

    def _count(self, peer: int, tag: int, receives: bool) -> int:
        """Return how many messages with a tag this rank has sent to a peer, or asked of it, before."""
        key = peer, tag, receives
        self._counts[key] = self._counts.get(key, -1) + 1
        return self._counts[key]

    def tell(self, error: CollectiveTimeoutError, peer: int | None) -> None:
        """Tell, where others look when they lose the connection to this rank, that it has waited for too long.

        The engine then closes all its connections, as if the rank had died. Collectives read the same.
        """
        note = {"waits": peer, "gone": False, "late": True, "text": str(error)}
        with contextlib.suppress(Exception):  # the store is gone, or stands still
            c10d.ask(lambda: self._store.set(f"hocket/trouble/{self.rank}", json.dumps(note)), _TELL_S)

    def heard(self, peer: int) -> str:
        """Return what a rank whose connection has ended tells of waiting for too long; "" if nothing."""

        def ask() -> str:
            key, end_s = f"hocket/trouble/{peer}", time.monotonic() + _GRACE_S
            while not self._store.check([key]):
                if time.monotonic() >= end_s:
                    return ""
                time.sleep(_LOOK_S)
            note = json.loads(self._store.get(key))
            return str(note["text"]) if note["late"] else ""

        with contextlib.suppress(Exception):
            return c10d.ask(ask, _TELL_S)
        return ""

    def leave(self) -> None:
        """Do nothing: peers hear of it when the engine is closed."""

    def close(self) -> None:
        """Do nothing: what is under way ends with the engine."""


class HostMessage(Work):
    """A send or receive; torch's Work. `number`: which one it is; None where only its head will tell."""

    def __init__(
        self, owner: HostMessages, tensor: Tensor, peer: int | None, tag: int, number: int | None, *, receives: bool
    ) -> None:
        super().__init__()
        self._owner = owner
        self._tensor = tensor
        self._flat = flatten(tensor)
        self._peer = peer
        self._tag = tag
        self._receives = receives
        self._lock = threading.Lock()
        self._over = False
        self._error: CommError | None = None
        self._body: Any = None
        self._head = _HEAD.pack(_MARK, DTYPE_NUMBERS[self._flat.dtype], self._flat.numel(), number or 0)
        data = self._flat.view(torch.uint8)
        whole = data.numel() <= _WHOLE_NBYTES
        engine = owner.engine
        if receives:
            self._frame = torch.zeros(_HEAD.size + _WHOLE_NBYTES, dtype=torch.uint8)
            frames = [self._frame]
            if peer is None:
                self._first = self._begin(engine.recv_anysource, frames, tag)
            else:
                self._first = self._begin(engine.recv, frames, peer, tag)
            if not whole and number is not None:
                self._body = self._begin(engine.recv, [data], peer, self._body_tag(self._head))
        else:
            head = torch.frombuffer(bytearray(self._head), dtype=torch.uint8)
            self._frame = torch.cat([head, data]) if whole else head
            self._first = self._begin(engine.send, [self._frame], peer, tag)
            if not whole:
                self._body = self._begin(engine.send, [data], peer, self._body_tag(self._head))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message has passed.

        Raises:
            CollectiveTimeoutError: It has not in time.
            CommError: The peer or the engine has failed.
            CollectiveMismatchError: The sender means a message of another type or length, which is lost.
        """
        with self._lock:
            if not self._over:
                given_s = timeout.total_seconds() if timeout is not None else 0.0
                progress = _observe.progress
                if progress is not None:
                    peer = -1 if self._peer is None else self._owner.numbers[self._peer]
                    progress.message_waiting(peer, self._flat.numel() * self._flat.element_size(), self._receives)
                try:
                    self._finish(given_s if given_s > 0 else self._owner.timeout_s)
                except CommError as error:
                    self._error = error
                finally:
                    self._over = True
                    if progress is not None:
                        progress.message_waited()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` has been called and returned, or would return at once."""
        return self._over or (self._first.is_completed() and (self._body is None or self._body.is_completed()))

    def is_success(self) -> bool:
        """Return whether it is over and went well."""
        return self._over and self._error is None

    def result(self) -> list[Tensor]:
        """Return the tensor."""
        return [self._tensor]

    def _source_rank(self) -> int:
        return -1 if self._peer is None else self._peer

    def __str__(self) -> str:
        who = "any rank" if self._peer is None else f"rank {self._owner.numbers[self._peer]}"
        verb = "recv from" if self._receives else "send to"
        return f"{verb} {who} of {_described(self._head)} with tag {self._tag}"

    def _body_tag(self, head: bytes) -> int:
        return _BODIES | zlib.crc32(head + struct.pack("<q", self._tag)) & ((1 << 29) - 1)

    def _finish(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        if self._peer is None:
            self._wait_for_any(deadline_s, timeout_s)
        else:
            self._wait(self._first, deadline_s, timeout_s)
        data = self._flat.view(torch.uint8)
        if self._receives:
            if self._peer is None:
                self._peer = int(self._first._source_rank())
            head = self._frame[: _HEAD.size].numpy().tobytes()
            if head[:_COMPARED] != self._head[:_COMPARED] or self._body is not None and head != self._head:
                self._refuse(head, deadline_s, timeout_s)
            if data.numel() <= _WHOLE_NBYTES:
                data.copy_(self._frame[_HEAD.size : _HEAD.size + data.numel()])
            elif self._body is None:
                self._body = self._begin(self._owner.engine.recv, [data], self._peer, self._body_tag(head))
        if self._body is not None:
            self._wait(self._body, deadline_s, timeout_s)
        if self._receives:
            write_back(self._flat, self._tensor)

    def _refuse(self, head: bytes, deadline_s: float, timeout_s: float) -> None:
        """Take the sender's bytes, so that it does not wait for ever, and say what it has sent.

        Raises:
            CollectiveMismatchError: Always.
        """
        text = f"{self} in group {self._owner.name!r}"
        if self._body is not None:
            self._owner.abandoned.append((self._body, self._flat))
        if head[:4] != _MARK:
            raise CollectiveMismatchError(f"{text}: what came is no message of this backend")
        _, dtype, numel, _ = _HEAD.unpack(head)
        nbytes = numel * DTYPES[dtype].itemsize
        if nbytes > _WHOLE_NBYTES:
            lost = torch.empty(nbytes, dtype=torch.uint8)
            body = self._begin(self._owner.engine.recv, [lost], self._peer, self._body_tag(head))
            self._wait(body, deadline_s, timeout_s)
        assert self._peer is not None
        raise CollectiveMismatchError(f"{text}: rank {self._owner.numbers[self._peer]} sent {_described(head)}")

    def _wait_for_any(self, deadline_s: float, timeout_s: float) -> None:
        """Wait for a message of any rank, as long as there is one: the engine does not say that all have gone."""
        came = c10d.begun(lambda: self._wait(self._first, deadline_s, timeout_s))
        while not wait([came], _LOOK_S).done:
            if self._owner.engine.alone() and not wait([came], _GRACE_S).done:  # what was sent before would be here
                self._owner.abandoned.append((self._first, self._frame))
                self._peer = int(self._owner.rank == 0)
                raise self._failed(ConnectionError("no other rank is left"), None)
        came.result()

    def _wait(self, work: Any, deadline_s: float, timeout_s: float) -> None:
        """Wait for a message of the engine, and say what failed."""
        try:
            left_s = deadline_s - time.monotonic()
            work.wait(timedelta(milliseconds=max(1, math.ceil(left_s * 1e3))))  # Gloo, which drops what is less
        except Exception as error:
            raise self._failed(error, timeout_s if time.monotonic() >= deadline_s else None) from error

    def _begin(self, method: Any, *args: Any) -> Any:
        """Post something to the engine, which refuses it where the connection has broken before."""
        try:
            return method(*args)
        except RuntimeError as error:
            raise self._failed(error, None) from error

    def _failed(self, error: Exception, passed_s: float | None) -> CommError:
        """Return what to raise for an error of the engine; `passed_s` is the time-out that has passed, if one has."""
        me, peer = self._owner.called[self._owner.rank], self._peer
        where = f"{self} in group {self._owner.name!r}"
        ranks = () if peer is None else (peer,)
        numbers = tuple(self._owner.numbers[r] for r in ranks)
        if passed_s is not None:
            text = f"{where} passed its timeout of {passed_s:g} s on {me}"
            if peer is not None:
                has_not = "sent it" if self._receives else "taken it"
                text += f": {self._owner.called[peer]} has not {has_not}, or the network between them stalls"
            late = CollectiveTimeoutError(text, ranks, numbers)
            self._owner.tell(late, peer)
            return late
        if peer is None:
            return CommError(f"{where} failed on {me}: {error}")
        its = self._owner.called[peer]
        if heard := self._owner.heard(peer):
            return CollectiveTimeoutError(f"{its} failed in {where}, as {me} heard: {heard}", ranks, numbers)
        return PeerDiedError(f"{its} died or left while {me} waited in {where}: {error}", peer, numbers)


def _described(head: bytes) -> str:
    _, dtype, numel, _ = _HEAD.unpack(head)
    return f"{numel} x {str(DTYPES[dtype]).removeprefix('torch.')}"
