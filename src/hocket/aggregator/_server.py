"""The aggregator: one event loop over all connections."""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ._connection import Connection
from ._frames import NOBODY, Fail, FailCode, Join, ProtocolError, Refuse
from ._group import Group, Member
from ._handshake import key_of
from ._link import Link, prepare
from ._operation import Operation
from ._pool import Pool
from ._settings import Limits
from ._upstream import Upstream

log = logging.getLogger("hocket.aggregator")

_TICK_S = 0.1
_PARENT_S = 10.0
_BREATH_S = 0.01


@dataclass(slots=True)
class Stats:
    """What an aggregator has done so far.

    Attributes:
        connections: clients that have proved themselves.
        refused: connections ended for what they said, or for who they were not.
        groups: that have come together.
        groups_failed: that ended by a failure.
        operations: served, by kind.
        received_nbytes: from children and the parent.
        sent_nbytes: to them.
        busy_s: seconds of work, of `wall_s` since the start.
        wall_s: since the start.
    """

    connections: int = 0
    refused: int = 0
    groups: int = 0
    groups_failed: int = 0
    operations: dict[str, int] = field(default_factory=dict)
    received_nbytes: int = 0
    sent_nbytes: int = 0
    busy_s: float = 0.0
    wall_s: float = 0.0


class Aggregator:
    """Serves groups until it is stopped.

    Args:
        address: where to listen; port 0 for any that is free.
        tokens: what clients must hold one of. Jobs with different tokens do not see each other.
        parent: the aggregator above, to which the first token is shown for groups that span more than this one.
        limits: quotas and deadlines.
        name: of this aggregator, for messages.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        address: tuple[str, int],
        tokens: Sequence[bytes],
        *,
        parent: tuple[str, int] | None = None,
        limits: Limits | None = None,
        name: str = "aggregator",
    ) -> None:
        self.limits = limits or Limits()
        self._tokens = {key_of(token): token for token in tokens}
        self._parent = parent
        self._name = name
        self._stats = Stats()
        self._began_s = time.monotonic()
        self._pool = Pool()
        self._links: set[Link] = set()
        self._changed: set[Link] = set()
        self._indebted: set[Group] = set()  # with credits to send
        self._forming: dict[tuple[bytes, bytes], Group] = {}
        self._groups: dict[Group, tuple[bytes, bytes]] = {}
        self._reserved_nbytes = 0
        self._stopping = False
        self._interest: dict[Link, int] = {}
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=256)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def stats(self) -> Stats:
        """The counters now."""
        stats = self._stats
        stats.wall_s = time.monotonic() - self._began_s
        return stats

    def stop(self) -> None:
        """Ends `run`; may be called from another thread or a signal handler."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._wake_out.send(b"x")

    def run(self) -> None:
        """Serves until `stop`, then ends all groups and closes all connections."""
        tick_s = 0.0
        try:
            while not self._stopping:
                events = self._selector.select(_TICK_S)
                begin_s = time.monotonic()
                for key, mask in events:
                    if key.data is not None:
                        self._serve(key.data, mask)
                    elif key.fileobj is self._listener:
                        self._accept()
                    else:
                        with contextlib.suppress(OSError):
                            self._wake_in.recv(64)
                self._flush()
                now_s = time.monotonic()
                if now_s >= tick_s:
                    tick_s = now_s + _TICK_S
                    self._check(now_s)
                    self._flush()
                if events:
                    self._stats.busy_s += time.monotonic() - begin_s
        finally:
            self._close()

    # --- connections --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(16):
            try:
                sock, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:  # the process has no descriptors left, say: those that it has are served on
                log.warning("a connection could not be accepted: %s", error)
                time.sleep(_BREATH_S)
                return
            address = f"{peer[0]}:{peer[1]}"
            clients = [link for link in self._links if isinstance(link, Connection)]
            strangers = sum(not link.known for link in clients)
            if len(clients) >= self.limits.connections or strangers >= max(4, self.limits.connections // 4):
                self._refused(address, f"{len(clients)} connections, {strangers} of strangers: no more are taken")
                sock.close()
                continue
            prepare(sock, self.limits.stall_s)
            self._add(Connection(sock, address, self._tokens, self.limits, self, self._note))

    def _add(self, link: Connection | Upstream) -> None:
        self._links.add(link)
        self._interest[link] = selectors.EVENT_READ
        self._selector.register(link.sock, selectors.EVENT_READ, link)
        self._changed.add(link)

    def _note(self, link: Link) -> None:
        """There is something to send, or another reason to look at a link at the end of this round."""
        self._changed.add(link)

    def _serve(self, link: Connection | Upstream, mask: int) -> None:
        if link not in self._links:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                link.flush()
            if mask & selectors.EVENT_READ:
                self._read(link)
            self._changed.add(link)
        except ProtocolError as error:
            self._drop(link, str(error), refused=True)
        except (OSError, EOFError) as error:
            self._drop(link, str(error) or type(error).__name__)

    def _read(self, link: Connection | Upstream) -> None:
        known = isinstance(link, Connection) and not link.known
        for frame in link.receive(link.place):
            link.handle(frame)
        link.await_nbytes(link.decoder.missing_nbytes)
        if known and isinstance(link, Connection) and link.known:
            self._stats.connections += 1

    def _flush(self) -> None:
        """Sends credits and what is queued, and watches for writing only where a socket is full.

        What a socket has taken makes new credits, and may let a paused link read again: so it goes round until no more
        comes of it, for nobody else would wake the loop for these.
        """
        while self._changed or self._indebted:
            indebted, self._indebted = self._indebted, set()
            for group in indebted:
                group.send_credits()
            changed, self._changed = self._changed, set()
            for link in changed:
                if link in self._links:
                    assert isinstance(link, Connection | Upstream)
                    self._flush_one(link)

    def _flush_one(self, link: Connection | Upstream) -> None:
        try:
            link.flush()
        except OSError as error:
            self._drop(link, str(error))
            return
        if isinstance(link, Upstream) and link.over and not link.waiting:
            self._remove(link)
            link.close()
            return
        interest = selectors.EVENT_WRITE if link.waiting else 0
        if not (isinstance(link, Upstream) and link.paused):
            interest |= selectors.EVENT_READ
        self._watch(link, interest)

    def _watch(self, link: Connection | Upstream, interest: int) -> None:
        before = self._interest[link]
        if interest == before:
            return
        self._interest[link] = interest
        if not before:
            self._selector.register(link.sock, interest, link)
        elif not interest:
            self._selector.unregister(link.sock)
        else:
            self._selector.modify(link.sock, interest, link)

    def _drop(self, link: Connection | Upstream, reason: str, *, refused: bool = False) -> None:
        """Ends one connection; only the groups that it was in suffer."""
        self._remove(link)
        if isinstance(link, Connection):
            if refused:
                self._refused(link.peer, reason)
                link.send(Refuse(reason))
                with contextlib.suppress(OSError):
                    link.flush()
            else:
                log.info("%s: %s", link.peer, reason)
            link.lost(reason)
        else:
            link.lost(reason)

    def _remove(self, link: Connection | Upstream) -> None:
        if link in self._links:
            self._links.discard(link)
            if self._interest.pop(link):
                self._selector.unregister(link.sock)
            self._stats.received_nbytes += link.received_nbytes
            self._stats.sent_nbytes += link.sent_nbytes

    def _refused(self, peer: str, reason: str) -> None:
        self._stats.refused += 1
        log.warning("%s was dropped: %s", peer, reason)

    # --- groups -------------------------------------------------------------------------------------------------------

    def join(self, connection: Connection, join: Join) -> None:
        """See Registry."""
        limits = self.limits
        level, key = join.levels[0], (connection.key, join.name)
        label = join.label.decode(errors="replace") or f"member {level.first}"
        name = join.name.decode(errors="replace")
        group = self._forming.get(key)
        if group is None:
            reserved = level.size * limits.window_nbytes
            reason = self._quota(connection, level.size, reserved)
            if reason is not None:
                self._turn_away(connection, join, label, reason)
                return
            group = Group(join, name, self._pool, limits, self)
            self._forming[key] = group
            self._groups[group] = key
            self._reserved_nbytes += reserved
        reason = group.admits(join)
        if reason is not None:
            raise ProtocolError(f"a JOIN of group {name!r} that does not fit: {reason}")
        older = group.members.get(level.child)
        if older is not None:  # it has come back before its old connection was seen to be gone
            older.gone = True
            older.link.send(Fail(older.handle, 0, FailCode.MEMBER_LOST, level.first, f"{label} has come a second time"))
        member = Member(connection, join.group, level, label)
        group.members[level.child] = member
        connection.places[join.group] = group, member
        if len(group.members) == group.size:
            del self._forming[key]
            self._begin(group, join.name, connection.token)

    def _quota(self, connection: Connection, size: int, reserved: int) -> str | None:
        limits = self.limits
        groups = sum(key == connection.key for key, _ in self._groups.values())
        if groups >= limits.groups:
            return f"there are {groups} groups already, as many as are allowed"
        if size > limits.members:
            return f"{size} members in a group; {limits.members} are allowed"
        if self._reserved_nbytes + reserved > limits.nbytes:
            return f"its windows need {reserved} bytes and {limits.nbytes - self._reserved_nbytes} are left"
        return None

    def _turn_away(self, connection: Connection, join: Join, label: str, reason: str) -> None:
        """Refuses a group without ending the connection."""
        name = join.name.decode(errors="replace")
        refused = Group(join, name, self._pool, self.limits, self)
        member = Member(connection, join.group, join.levels[0], label)
        refused.members[join.levels[0].child] = member
        connection.places[join.group] = refused, member
        refused.fail_position(FailCode.QUOTA, NOBODY, f"group {name!r} is not taken: {reason}")

    def _begin(self, group: Group, name: bytes, token: bytes) -> None:
        if not group.spans_meet():
            group.fail(FailCode.PROTOCOL, None, "the positions of its members do not follow each other")
        elif not group.above:
            self._stats.groups += 1
            group.form(secrets.randbits(63) | 1)
        elif self._parent is None:
            group.fail(FailCode.PROTOCOL, None, "it spans more than this aggregator, which has no parent")
        else:
            self._stats.groups += 1
            label = f"{self._name} ({self.address[0]}:{self.address[1]})".encode()[:200]
            try:
                link = Upstream(group, name, self._parent, token, label, self._note)
            except OSError as error:
                group.fail(FailCode.PARENT_LOST, None, f"the parent aggregator cannot be reached: {error}")
                return
            prepare(link.sock, self.limits.stall_s)
            group.parent = link
            self._add(link)

    def group_over(self, group: Group, code: FailCode | None, reason: str) -> None:
        """See Owner."""
        key = self._groups.pop(group, None)
        if key is None:
            return
        if self._forming.get(key) is group:
            del self._forming[key]
        self._reserved_nbytes -= group.size * self.limits.window_nbytes
        if code is not None and code != FailCode.CLOSING:
            self._stats.groups_failed += 1

    def credits_due(self, group: Group) -> None:
        """See Owner."""
        self._indebted.add(group)

    def operation_over(self, group: Group, operation: Operation) -> None:
        """See Owner."""
        kind = operation.request.kind.name.lower()
        self._stats.operations[kind] = self._stats.operations.get(kind, 0) + 1

    # --- time ---------------------------------------------------------------------------------------------------------

    def _check(self, now_s: float) -> None:
        limits = self.limits
        for link in [link for link in self._links if isinstance(link, Connection | Upstream)]:
            if isinstance(link, Connection) and not link.known and now_s - link.began_s > limits.hello_s:
                self._drop(link, f"it has not proved itself within {limits.hello_s:g} s", refused=True)
            elif link.waiting and now_s - link.moved_s > limits.stall_s:
                self._drop(link, f"it has taken nothing of what waits for it for {limits.stall_s:g} s", refused=True)
            elif isinstance(link, Upstream) and not link.group.formed and now_s - link.heard_s > _PARENT_S:
                self._drop(link, f"no answer for {_PARENT_S:g} s")
        for group in list(self._groups):
            group.check(now_s)

    def _close(self) -> None:
        for group in list(self._groups):
            group.fail(FailCode.CLOSING, None, "the aggregator is closing")
        for link in [link for link in self._links if isinstance(link, Connection | Upstream)]:
            with contextlib.suppress(OSError):
                link.flush()
            self._remove(link)
            link.close()
        self._selector.close()
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()
