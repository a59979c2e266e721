"""The connection of a leaf aggregator to its parent, one for each group, inside the leaf's event loop."""

from __future__ import annotations

import errno
import secrets
import socket
from collections import deque
from collections.abc import Callable

from ._frames import (
    MOST_SEGMENT_NBYTES,
    NEWEST_VERSION,
    NOBODY,
    NONCE_NBYTES,
    OLDEST_VERSION,
    SERVER_FRAMES,
    Ack,
    Challenge,
    Credit,
    Data,
    Done,
    Fail,
    FailCode,
    Frame,
    FrameType,
    Hello,
    Join,
    Joined,
    Leave,
    Open,
    Ping,
    Pong,
    Proof,
    ProtocolError,
    Refuse,
    Welcome,
)
from ._group import Group
from ._handshake import key_of, prove, same
from ._link import Link, Release
from ._pool import Array

_HANDLE = 1


class Upstream(Link):
    """See the head of this module; it is the `Parent` of its group.

    Args:
        group: all of whose members at this aggregator have come.
        name: of the group, as the members gave it.
        address: of the parent.
        token: proves this aggregator to it, and the parent to us.
        label: names this aggregator there.
        changed: see Link; also called when reading may go on, or when the end has come.
    """

    def __init__(
        self,
        group: Group,
        name: bytes,
        address: tuple[str, int],
        token: bytes,
        label: bytes,
        changed: Callable[[Link], None],
    ) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        super().__init__(sock, frozenset({FrameType.CHALLENGE, FrameType.REFUSE}), MOST_SEGMENT_NBYTES, changed)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            raise OSError(code, f"no way to {address[0]}:{address[1]}")
        self.group = group
        self.over = False
        self._name = name
        self._token = token
        self._label = label
        self._changed = changed
        self._nonce = secrets.token_bytes(NONCE_NBYTES)
        self._window_nbytes = 0
        self._credit_nbytes = 0
        self._blocked: deque[tuple[int, int, Array, Release]] = deque()
        self._down_nbytes = 0
        self._incoming: Array | None = None
        self.send(Hello(OLDEST_VERSION, NEWEST_VERSION, key_of(token), self._nonce))

    @property
    def paused(self) -> bool:
        """Whether children take what comes down more slowly than it comes: then nothing more is read."""
        return self._down_nbytes > self._window_nbytes > 0

    # --- the way up, called by the group ------------------------------------------------------------------------------

    def open(self, request: Open) -> None:
        """See Parent."""
        self.send(request._replace(group=_HANDLE))

    def send_up(self, sequence: int, offset: int, payload: Array, release: Release) -> None:
        """See Parent."""
        self._blocked.append((sequence, offset, payload, release))
        self._send_allowed()

    def _send_allowed(self) -> None:
        while self._blocked and self._blocked[0][2].nbytes <= self._credit_nbytes:
            sequence, offset, payload, release = self._blocked.popleft()
            self._credit_nbytes -= payload.nbytes
            self.send_data(_HANDLE, sequence, offset, payload, release)

    def acknowledge(self, sequence: int) -> None:
        """See Parent."""
        self.send(Ack(_HANDLE, sequence))

    def consumed(self, nbytes: int) -> None:
        """See Parent."""
        self._down_nbytes -= nbytes
        self._changed(self)

    def end(self, code: FailCode, member: int, reason: str) -> None:
        """See Parent."""
        if not self.over:
            self.over = True
            self._blocked.clear()
            self.send(Leave(_HANDLE) if code == FailCode.CLOSING else Fail(_HANDLE, 0, code, member, reason))
            self._changed(self)

    # --- what comes down ----------------------------------------------------------------------------------------------

    def place(self, data: Data) -> memoryview:
        """Where a segment from the parent shall lie."""
        operation = self.group.operations.get(data.sequence)
        if operation is None or data.offset + data.nbytes > operation.request.nbytes:
            raise ProtocolError(f"a segment of operation {data.sequence} from the parent, which is not under way")
        self._incoming = self.group.pool.take(data.nbytes)
        return self._incoming.data

    def handle(self, frame: Frame) -> None:
        """One frame of the parent's."""
        match frame:
            case Data():
                assert self._incoming is not None
                buffer, self._incoming = self._incoming, None
                self._down_nbytes += buffer.nbytes
                operation = self.group.operations.get(frame.sequence)
                if operation is not None:
                    operation.take_from_parent(frame.offset, buffer)
            case Credit():
                self._credit_nbytes += frame.nbytes
                self._send_allowed()
            case Done():
                operation = self.group.operations.get(frame.sequence)
                if operation is not None:
                    operation.all_done()
            case Fail():
                self.over = True
                self.group.fail_position(frame.code, frame.member, frame.reason, frame.sequence)
            case Ping():
                self.send(Pong(frame.number))
            case Joined():
                self.group.form(frame.generation)
            case Challenge():
                self._answer(frame)
            case Welcome():
                self._begin(frame)
            case Refuse():
                raise ProtocolError(f"the parent refuses: {frame.reason}")

    def _answer(self, challenge: Challenge) -> None:
        version, theirs = challenge.version, challenge.nonce
        if not OLDEST_VERSION <= version <= NEWEST_VERSION:
            raise ProtocolError(f"the parent chose version {version}")
        if not same(challenge.proof, prove(self._token, b"server", version, self._nonce, theirs)):
            raise ProtocolError("the parent does not hold the token")
        self.send(Proof(prove(self._token, b"client", version, self._nonce, theirs)))
        self.decoder.expected = frozenset({FrameType.WELCOME, FrameType.REFUSE})

    def _begin(self, welcome: Welcome) -> None:
        self.decoder.expected = SERVER_FRAMES
        self._window_nbytes = self._credit_nbytes = welcome.window_nbytes
        self.send(Join(_HANDLE, self.group.total, self.group.above, self._name, self._label))

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self.over = True
        self._blocked.clear()
        self.close()
        self.group.fail_position(FailCode.PARENT_LOST, NOBODY, f"the parent aggregator is gone: {reason}")
