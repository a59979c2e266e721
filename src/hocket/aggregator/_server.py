"""The aggregator: one event loop over all connections."""

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Sequence

from ._codec import encode
from ._connection import Connection
from ._directory import Directory
from ._frames import ProtocolError, Refuse
from ._group import Group
from ._handshake import key_of
from ._link import FrameLink, prepare
from ._member import Parent
from ._settings import Limits
from ._stats import Stats
from ._upstream import Upstream

log = logging.getLogger("hocket.aggregator")

_TICK_S = 0.1
_BREATH_S = 0.01
_GREETING_NBYTES = 1 << 10


class Aggregator:
    """Serves groups until it is stopped.

    Args:
        address: Address to listen on; port 0 for any that is free.
        tokens: Tokens of which clients must hold one. Jobs with different tokens do not see each other.
        parent: Address of the aggregator above; it is shown the first token for groups that span more than this one.
        limits: Quotas and deadlines.
        name: Name of this aggregator, for messages.

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
        self._directory = Directory(self.limits, self._stats, None if parent is None else self._climb)
        self._links: set[Connection | Upstream] = set()
        self._changed: set[FrameLink] = set()  # to be looked at when this round of the loop ends
        self._stopping = False
        self._interest: dict[FrameLink, int] = {}
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
        """Return the counters now."""
        stats = self._stats
        stats.wall_s = time.monotonic() - self._began_s
        return stats

    def stop(self) -> None:
        """End `run`; may be called from another thread or a signal handler."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._wake_out.send(b"x")

    def run(self) -> None:
        """Serve until `stop`, then end all groups and close all connections."""
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
            strangers = [link for link in clients if not link.known]
            full = len(clients) >= self.limits.connections
            if strangers and (full or len(strangers) >= max(4, self.limits.connections // 4)):
                # A client proves itself at once, so who has taken the longest goes: strangers keep none out.
                self._drop(min(strangers, key=lambda link: link.began_s), "others wait, and it is silent", refused=True)
            elif full:
                self._turn_away(sock, address, f"{len(clients)} connections: no more are taken")
                continue
            prepare(sock, self.limits.stall_s)
            self._add(Connection(sock, address, self._tokens, self.limits, self._directory, self._note))

    def _turn_away(self, sock: socket.socket, peer: str, reason: str) -> None:
        self._refused(peer, reason)
        sock.setblocking(False)
        with sock, contextlib.suppress(OSError):
            sock.send(encode(Refuse(reason)))
            sock.recv(_GREETING_NBYTES)  # what is closed unread takes the reason back

    def _add(self, link: Connection | Upstream) -> None:
        self._links.add(link)
        self._interest[link] = selectors.EVENT_READ
        self._selector.register(link.sock, selectors.EVENT_READ, link)
        self._changed.add(link)

    def _note(self, link: FrameLink) -> None:
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
        """Send credits and what is queued, and watch for writing only where a socket is full.

        What a socket has taken makes new credits, and may let a paused link read again: so it goes round until no more
        comes of it, for nobody else would wake the loop for these.
        """
        directory = self._directory
        while self._changed or directory.indebted:
            indebted, directory.indebted = directory.indebted, set()
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
            if isinstance(link, Upstream) and link.over and not link.waiting:
                # The parent closes in its turn; to close what is not read would take back the reason just sent.
                link.sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._drop(link, str(error))
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
        """End one connection; only the groups that it was in suffer."""
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

    def _climb(self, group: Group, name: bytes, token: bytes) -> Parent:
        """Connect a group to the aggregator above."""
        assert self._parent is not None
        label = f"{self._name} ({self.address[0]}:{self.address[1]})".encode()[:200]
        link = Upstream(group, name, self._parent, token, label, self._note)
        prepare(link.sock, self.limits.stall_s)
        self._add(link)
        return link

    # --- time ---------------------------------------------------------------------------------------------------------

    def _check(self, now_s: float) -> None:
        limits = self.limits
        for link in list(self._links):
            if isinstance(link, Connection) and not link.known and now_s - link.began_s > limits.hello_s:
                self._drop(link, f"it has not proved itself within {limits.hello_s:g} s", refused=True)
            elif link.waiting and now_s - link.moved_s > limits.stall_s:
                self._drop(link, f"it has taken nothing of what waits for it for {limits.stall_s:g} s", refused=True)
            elif isinstance(link, Upstream):
                if not link.answers(now_s, limits.stall_s):
                    self._drop(link, f"no answer for {limits.stall_s:g} s")
            # A child that waits for its own children reads nothing meanwhile, for as long as it lets these.
            elif link.leads_to_others and not link.answers(now_s, 2 * limits.stall_s):
                self._drop(link, f"no answer for {2 * limits.stall_s:g} s")
        self._directory.check(now_s)

    def _close(self) -> None:
        self._directory.close()
        for link in list(self._links):
            with contextlib.suppress(OSError):
                link.flush()
            self._remove(link)
            link.close()
        self._selector.close()
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()
