"""A client's connection at the aggregator: who it is, which groups it is in, and what it may say."""

import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from . import _frames as wire
from ._group import Group
from ._handshake import prove, same
from ._link import FrameLink
from ._member import Member
from ._pool import Array

if TYPE_CHECKING:
    from ._settings import Limits


class Registry(Protocol):
    """Where groups are found."""

    def join(self, connection: "Connection", join: wire.Join) -> None:
        """Put a client into a group, or raise ProtocolError if it may not be there."""


class Connection(FrameLink):
    """See the head of this module."""

    def __init__(
        self,
        sock: socket.socket,  # accepted socket, non-blocking
        peer: str,  # address of the client, for messages
        tokens: Mapping[bytes, bytes],  # known tokens, by their keys
        limits: "Limits",  # quotas and deadlines
        registry: Registry,  # registry of groups
        changed: Callable[[FrameLink], None],  # see FrameLink
    ) -> None:
        super().__init__(sock, frozenset({wire.FrameType.HELLO}), limits.segment_nbytes, changed)
        self.peer = peer
        self.began_s = time.monotonic()
        self.known = False
        self.key = b""
        self.token = b""
        self.places: dict[int, tuple[Group, Member]] = {}
        self._tokens = tokens
        self._limits = limits
        self._registry = registry
        self._version = 0
        self._nonce = secrets.token_bytes(wire.NONCE_NBYTES)
        self._their_nonce = b""
        self._handle = 0  # the highest that the client has used
        self._incoming: Array | None = None
        self._trash: Array | None = None

    @property
    def leads_to_others(self) -> bool:
        """Whether the client is an aggregator, which always reads; ranks read only what they wait for."""
        return any(len(member.span) > 1 and not group.ended for group, member in self.places.values())

    def place(self, data: wire.Data) -> memoryview:
        """Return where a segment shall lie; of a group that has ended, nowhere in particular."""
        group, member = self._find(data.group)
        if group.ended or member.gone:
            if self._trash is None or self._trash.nbytes < data.nbytes:
                self._trash = group.pool.take(self._limits.segment_nbytes)
            return self._trash.data[: data.nbytes]
        group.expect(member, data)
        self._incoming = group.pool.take(data.nbytes)
        return self._incoming.data

    def handle(self, frame: wire.Frame) -> None:
        """Handle one frame of the client's. Raises ProtocolError: it may not say this; the connection must end."""
        match frame:
            case wire.Data():
                if self._incoming is not None:
                    buffer, self._incoming = self._incoming, None
                    group, member = self._find(frame.group)
                    operation = group.operations.get(frame.sequence)
                    if operation is None:  # it, or its group, has ended while the segment came
                        group.pool.give(buffer)
                    else:
                        operation.take(member, frame.offset, buffer)
            case wire.Open():
                group, member = self._find(frame.group)
                if not group.ended:
                    group.open(member, frame)
            case wire.Ack():
                group, member = self._find(frame.group)
                if not group.ended:
                    group.acknowledge(member, frame.sequence)
            case wire.Ping():
                self.send(wire.Pong(frame.number))
            case wire.Join():
                self._join(frame)
            case wire.Leave():
                group, member = self._find(frame.group)
                if not group.ended and not member.gone:
                    group.leave(member)
            case wire.Fail():
                group, member = self._find(frame.group)
                if not group.ended:
                    self._fail(group, member, frame)
            case wire.Hello():
                self._greet(frame)
            case wire.Proof():
                self._check(frame)

    def _find(self, handle: int) -> tuple[Group, Member]:
        found = self.places.get(handle)
        if found is None:
            raise wire.ProtocolError(f"group {handle}, which this client has not joined")
        return found

    def _join(self, frame: wire.Join) -> None:
        if frame.group != self._handle + 1:
            raise wire.ProtocolError(f"group {frame.group} after group {self._handle}")
        self._handle += 1
        for handle in [h for h, (group, _) in self.places.items() if group.ended][: -self._limits.groups]:
            del self.places[handle]
        self._registry.join(self, frame)

    def _fail(self, group: Group, member: Member, frame: wire.Fail) -> None:
        position = frame.member if frame.member in member.span else wire.NOBODY
        member.gone = True
        group.fail_position(frame.code, position, f"{member.label}: {frame.reason}"[:900])

    def _greet(self, hello: wire.Hello) -> None:
        self._version = min(hello.newest, wire.NEWEST_VERSION)
        if self._version < max(hello.oldest, wire.OLDEST_VERSION):
            raise wire.ProtocolError(
                f"versions {hello.oldest} to {hello.newest} of the protocol; this aggregator speaks "
                f"{wire.OLDEST_VERSION} to {wire.NEWEST_VERSION}"
            )
        token = self._tokens.get(hello.key)
        if token is None:
            raise wire.ProtocolError("a token that this aggregator does not know")
        self.key, self.token, self._their_nonce = hello.key, token, hello.nonce
        proof = prove(token, b"server", self._version, hello.nonce, self._nonce)
        self.send(wire.Challenge(self._version, self._nonce, proof))
        self.decoder.expected = frozenset({wire.FrameType.PROOF})

    def _check(self, frame: wire.Proof) -> None:
        if not same(frame.proof, prove(self.token, b"client", self._version, self._their_nonce, self._nonce)):
            raise wire.ProtocolError("a proof that does not hold: it has not the token")
        self.known = True
        self.decoder.expected = wire.CLIENT_FRAMES
        limits = self._limits
        self.send(wire.Welcome(limits.segment_nbytes, limits.window_nbytes, limits.operations, limits.groups))

    def lost(self, reason: str) -> None:
        """End the groups that the connection was in, since it is over."""
        for group, member in list(self.places.values()):
            if not group.ended and group.members.get(member.index) is member and not member.gone:
                member.gone = True
                group.fail(wire.FailCode.MEMBER_LOST, member, f"{member.label} ({self.peer}) is gone: {reason}")
        self.close()
