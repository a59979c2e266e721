"""The connection of a leaf aggregator to its parent, one for each group, inside the leaf's event loop."""

import errno
import socket
from collections import deque
from collections.abc import Callable
from functools import partial

from . import _frames as wire
from ._group import Group
from ._handshake import Applicant
from ._link import FrameLink, Release
from ._pool import Array

_HANDLE = 1


class Upstream(FrameLink):
    """See the head of this module; it is the `Parent` of its group."""

    def __init__(
        self,
        group: Group,  # group all of whose members at this aggregator have come
        name: bytes,  # name of the group, as the members gave it
        address: tuple[str, int],  # address of the parent
        token: bytes,  # token that proves this aggregator to the parent, and the parent to us
        label: bytes,  # name of this aggregator there
        # see FrameLink; also called when reading may go on, or when the end has come
        changed: Callable[[FrameLink], None],
    ) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        super().__init__(
            sock, frozenset({wire.FrameType.CHALLENGE, wire.FrameType.REFUSE}), wire.MOST_SEGMENT_NBYTES, changed
        )
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            raise OSError(code, f"no way to {address[0]}:{address[1]}")
        self.group = group
        self.over = False
        self._name = name
        self._label = label
        self._changed = changed
        self._window_nbytes = 0
        self._credit_nbytes = 0
        # what waits for credits: the operation, how many bytes it takes, and what sends it
        self._blocked: deque[tuple[int, int, Callable[[], None]]] = deque()
        self._down_nbytes = 0
        self._incoming: Array | None = None
        self._applicant = Applicant(token)
        self._applicant.greet(self)

    @property
    def paused(self) -> bool:
        """Whether children take what comes down more slowly than it comes: then nothing more is read."""
        return not self.over and self._down_nbytes > self._window_nbytes > 0

    def answers(self, now_s: float, most_s: float) -> bool:
        if self.paused:  # what it may have answered is not read
            self.heard_s = now_s
        if not self._window_nbytes:  # it takes no questions yet, and owes an answer to the greeting
            return now_s - self.heard_s <= most_s
        return super().answers(now_s, most_s)

    # --- the way up, called by the group ------------------------------------------------------------------------------

    def open(self, request: wire.Open) -> None:
        """See Parent."""
        self.send(request._replace(group=_HANDLE))

    def send_up(self, sequence: int, offset: int, payload: Array, release: Release) -> None:
        """See Parent."""
        send = partial(self.send_data, _HANDLE, sequence, offset, payload, release)
        self._blocked.append((sequence, payload.nbytes, send))
        self._send_allowed()

    def _send_allowed(self) -> None:
        while self._blocked and self._blocked[0][1] <= self._credit_nbytes:
            _, nbytes, send = self._blocked.popleft()
            self._credit_nbytes -= nbytes
            send()

    def acknowledge(self, sequence: int) -> None:
        """See Parent; behind the operation's own segments, and before those of later ones."""
        behind = max((at for at, blocked in enumerate(self._blocked, 1) if blocked[0] == sequence), default=0)
        self._blocked.insert(behind, (sequence, 0, partial(self.send, wire.Ack(_HANDLE, sequence))))
        self._send_allowed()

    def consumed(self, nbytes: int) -> None:
        """See Parent."""
        self._down_nbytes -= nbytes
        self._changed(self)

    def end(self, code: wire.FailCode, member: int, reason: str) -> None:
        """See Parent."""
        if not self.over:
            self.over = True
            self._blocked.clear()
            self.send(
                wire.Leave(_HANDLE) if code == wire.FailCode.CLOSING else wire.Fail(_HANDLE, 0, code, member, reason)
            )
            self._changed(self)

    # --- what comes down ----------------------------------------------------------------------------------------------

    def place(self, data: wire.Data) -> memoryview:
        """Return where a segment from the parent shall lie."""
        if self.over:
            return memoryview(bytearray(data.nbytes))
        operation = self.group.operations.get(data.sequence)
        if operation is None or data.offset + data.nbytes > operation.request.nbytes:
            raise wire.ProtocolError(f"a segment of operation {data.sequence} from the parent, which is not under way")
        self._incoming = self.group.pool.take(data.nbytes)
        return self._incoming.data

    def handle(self, frame: wire.Frame) -> None:
        """Handle one frame of the parent's."""
        if self.over:
            return
        match frame:
            case wire.Data():
                assert self._incoming is not None
                buffer, self._incoming = self._incoming, None
                self._down_nbytes += buffer.nbytes
                operation = self.group.operations.get(frame.sequence)
                if operation is not None:
                    operation.take_from_parent(frame.offset, buffer)
            case wire.Credit():
                self._credit_nbytes += frame.nbytes
                self._send_allowed()
            case wire.Done():
                operation = self.group.operations.get(frame.sequence)
                if operation is not None:
                    operation.all_done()
            case wire.Fail():
                self.over = True
                self.group.fail_position(frame.code, frame.member, frame.reason, frame.sequence)
            case wire.Ping():
                self.send(wire.Pong(frame.number))
            case wire.Joined():
                self.group.form(frame.generation)
            case wire.Challenge():
                self._applicant.answer(frame, self)
            case wire.Welcome():
                self._begin(frame)
            case wire.Refuse():
                raise wire.ProtocolError(f"it refuses this aggregator: {frame.reason}")

    def _begin(self, welcome: wire.Welcome) -> None:
        self.decoder.expected = wire.SERVER_FRAMES
        self._window_nbytes = self._credit_nbytes = welcome.window_nbytes
        self.send(wire.Join(_HANDLE, self.group.total, self.group.above, self._name, self._label))

    def lost(self, reason: str) -> None:
        """End with the connection, which is gone."""
        self.over = True
        self._blocked.clear()
        self.close()
        self.group.fail_position(wire.FailCode.PARENT_LOST, wire.NOBODY, f"the parent aggregator is gone: {reason}")
