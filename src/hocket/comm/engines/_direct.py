"""Short messages over connections of this process's own: no thread of an engine stands between sender and receiver.

An engine hands every message to a thread of its own, there and back, which costs more than a short message itself. Here
whoever sends writes to the connection, and whoever waits reads from it. What all ranks tell each other before every
operation goes this way (`FlatFrames`); data goes through the engine, whose thread moves it while others compute.
"""

import contextlib
import hmac
import ipaddress
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch

from ..keep_alive import keep_alive
from ..scheduled import PendingMessage
from ..transport import CommError, PeerDiedError

_PROOF_NBYTES: Final = 32
_HELLO: Final = struct.Struct(f"<I{_PROOF_NBYTES}s")  # who connects, and what was written to the store for him
_LENGTH: Final = struct.Struct("<I")
_STRANGERS: Final = 256  # connections at once that have not proved themselves; the next takes the oldest one's place
_BUFFER_NBYTES: Final = 1 << 17
_LOOK_S: Final = 600.0  # a poll takes milliseconds that fit in a C int

_open: "weakref.WeakSet[DirectPoints]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Let go of the connections in a forked child: they are to end with the rank, not with its data loader."""
    for points in _open:
        for one in points.connections.values():
            one.socket.close()


os.register_at_fork(after_in_child=_close_in_child)


class _Connection:
    """A connection to one rank; messages are lengths and bytes.

    Args:
        socket: Connected, proved.
        peer: Number of the other rank.
    """

    def __init__(self, socket: socket.socket, peer: int) -> None:
        socket.setblocking(False)
        keep_alive(socket)
        self.socket = socket
        self.peer = peer
        self._memory = memoryview(bytearray(_BUFFER_NBYTES))
        self._arrived = 0  # bytes in memory that have not been taken
        self._unsent = bytearray()
        self.ready = select.poll()
        self.ready.register(socket.fileno(), select.POLLIN)

    def send(self, data: memoryview) -> None:
        """Send a message; what the network does not take at once goes with the next `flush`."""
        length = _LENGTH.pack(len(data))
        if self._unsent:
            self._unsent += length + data
            self.flush()
            return
        try:
            sent = self.socket.sendmsg((length, data))
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self.failed(error) from error
        if sent < _LENGTH.size + len(data):
            self._unsent += (length + bytes(data))[sent:]

    def flush(self) -> bool:
        """Send what is left; return whether nothing is."""
        while self._unsent:
            try:
                del self._unsent[: self.socket.send(self._unsent)]
            except BlockingIOError:
                return False
            except OSError as error:
                raise self.failed(error) from error
        return True

    def take(self, place: memoryview) -> bool:
        """Read what has come; return whether the next message is whole, and then it lies at the begin of `place`."""
        if self._taken(place):
            return True
        if _LENGTH.size + len(place) > len(self._memory):
            memory = memoryview(bytearray(2 * (_LENGTH.size + len(place))))
            memory[: self._arrived] = self._memory[: self._arrived]
            self._memory = memory
        while True:
            try:
                nbytes = self.socket.recv_into(self._memory[self._arrived :])
            except BlockingIOError:
                return False
            except OSError as error:
                raise self.failed(error) from error
            if not nbytes:
                raise self.failed(ConnectionError("it has closed its connection"))
            self._arrived += nbytes
            if self._taken(place):
                return True

    def _taken(self, place: memoryview) -> bool:
        memory, arrived = self._memory, self._arrived
        if arrived < _LENGTH.size:
            return False
        (nbytes,) = _LENGTH.unpack_from(memory)
        if nbytes > len(place):
            raise self.failed(f"it sends {nbytes} bytes where at most {len(place)} are expected")
        end = _LENGTH.size + nbytes
        if arrived < end:
            return False
        place[:nbytes] = memory[_LENGTH.size : end]
        self._arrived = arrived - end
        if self._arrived:
            memory[: self._arrived] = bytes(memory[end:arrived])
        return True

    def failed(self, why: object) -> CommError:
        """Return the error that names the other rank, a PeerDiedError if its end of the connection is gone."""
        text = f"the connection to rank {self.peer} of the group failed: {why}"
        error = PeerDiedError(text, self.peer) if isinstance(why, ConnectionError) else CommError(text)
        error.peer = self.peer
        return error


class _Leaving:
    """A `PendingMessage` that has been given to a connection, which keeps what the network did not take at once."""

    __slots__ = ("_connection", "_points")

    def __init__(self, points: "DirectPoints", connection: _Connection) -> None:
        self._points = points
        self._connection = connection

    def done(self) -> bool:
        return self._connection.flush()

    def wait(self, timeout_s: float) -> None:
        if not self._connection.flush():
            self._points.wait_until(self._connection.flush, self._connection, timeout_s)


class _Coming:
    """A `PendingMessage` that is to come."""

    __slots__ = ("_connection", "_place", "_points")

    def __init__(self, points: "DirectPoints", connection: _Connection, place: memoryview) -> None:
        self._points = points
        self._connection = connection
        self._place = place

    def done(self) -> bool:
        """See PendingMessage; never known without looking."""
        return False

    def wait(self, timeout_s: float) -> None:
        connection = self._connection
        if not connection.take(self._place):
            self._points.wait_until(lambda: connection.take(self._place), connection, timeout_s)


class DirectPoints:
    """A `PointToPoint` over connections to some ranks; messages between two keep their order.

    Args:
        connections: By rank.
    """

    name = "tcp"

    def __init__(self, connections: dict[int, _Connection]) -> None:
        self.connections = connections
        _open.add(self)

    def send(self, flat: torch.Tensor, peer: int) -> PendingMessage:
        connection = self.connections[peer]
        connection.send(_view(flat))
        return _Leaving(self, connection)

    def receive(self, flat: torch.Tensor, peer: int) -> PendingMessage:
        """See PointToPoint. A message may be shorter than its place."""
        return _Coming(self, self.connections[peer], _view(flat))

    def wait_until(self, done: Callable[[], bool], connection: _Connection, timeout_s: float) -> None:
        """Block until something is done that a connection's readiness brings about.

        What other connections still have to send goes meanwhile: others may wait for it, and this rank for them.

        Raises:
            CommError: The time is over.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise connection.failed(f"nothing came within {timeout_s:.3g} s")
            left_ms = min(left_s, _LOOK_S) * 1e3
            sending = [one for one in self.connections.values() if not one.flush()]
            if not sending:
                connection.ready.poll(left_ms)
            else:
                ready = select.poll()
                ready.register(connection.socket.fileno(), select.POLLIN)
                for one in sending:
                    also = select.POLLIN if one is connection else 0
                    ready.register(one.socket.fileno(), select.POLLOUT | also)
                ready.poll(left_ms)
            if done():
                return

    def ended(self) -> set[int]:
        """Return the ranks whose end of the connection is gone; never waits."""
        poll, peers = select.poll(), {one.socket.fileno(): peer for peer, one in self.connections.items()}
        for descriptor in peers:
            poll.register(descriptor, select.POLLRDHUP)  # which unread messages of a rank that is gone do not hide
        return {peers[descriptor] for descriptor, _ in poll.poll(0)}

    def close(self) -> None:
        """End all connections: who waits for this rank hears of it, and who waits here as well."""
        for one in self.connections.values():
            with contextlib.suppress(OSError):  # it has ended already
                one.socket.shutdown(socket.SHUT_RDWR)


def connect_directly(
    store: Any, rank: int, size: int, peers: Iterable[int], address: str | None, timeout: timedelta
) -> DirectPoints | None:
    """Connect this rank with some others; every rank of the group takes part, and all come to the same answer.

    A rank proves that it has read, in the group's store, what the other wrote there. The listening socket is closed
    when all have come.

    Args:
        store: The group's.
        rank: Number of this rank.
        size: Number of ranks.
        peers: With whom; they connect with this rank, too.
        address: Address of this host to listen at; None: it is not known.
        timeout: How long to wait for the others.

    Returns:
        None where some rank does not know its address.

    Raises:
        CommError: Somebody has not come in time.
    """
    deadline_s = time.monotonic() + timeout.total_seconds()
    peers = sorted(set(peers) - {rank})
    mine, listener = secrets.token_bytes(_PROOF_NBYTES), None
    if address is not None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=1024)
    try:
        if listener is None:
            store.set("direct/unknown", "")
        where = f"{listener.getsockname()[1]} {mine.hex()} {address}" if listener is not None else ""
        store.set(f"direct/{rank}", where)
        everyone = [f"direct/{r}" for r in range(size)]
        try:
            store.wait(everyone, timeout)
        except Exception as error:
            late = next((r for r, key in enumerate(everyone) if not store.check([key])), None)
            if late is None:
                raise
            raise _unreachable(late, "it has not come") from error
        if listener is None or store.check(["direct/unknown"]):
            return None
        keys = [f"direct/{peer}" for peer in peers]  # not all: among thousands that would be many bytes of one store
        values = store.multi_get(keys) if keys else []
        published = {peer: value.decode() for peer, value in zip(peers, values, strict=True)}
        return DirectPoints(_connections(listener, rank, peers, published, mine, deadline_s))
    finally:
        if listener is not None:
            listener.close()


def _connections(
    listener: socket.socket,
    rank: int,
    peers: Sequence[int],
    published: Mapping[int, str],
    mine: bytes,
    deadline_s: float,
) -> dict[int, _Connection]:
    """Return connections: this rank calls those before it, and is called by those after it."""
    found: dict[int, socket.socket] = {}
    try:
        for peer in (one for one in peers if one < rank):
            found[peer] = _call(published[peer], rank, peer, deadline_s)
        for peer, one in _callers(listener, [one for one in peers if one > rank], mine, deadline_s).items():
            found[peer] = one
            one.sendall(_proof_of(published[peer]))
        for peer in (one for one in peers if one < rank):
            while (answer := _answer(found[peer], deadline_s)) is None:  # strangers have taken this rank's place
                found[peer].close()
                found[peer] = _call(published[peer], rank, peer, deadline_s)
            if not hmac.compare_digest(answer, mine):
                raise _unreachable(peer, "whoever listens there has not read the group's store")
        for one in found.values():
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        for one in found.values():
            one.close()
        raise
    return {peer: _Connection(one, peer) for peer, one in found.items()}


def _call(published: str, rank: int, peer: int, deadline_s: float) -> socket.socket:
    """Return a connection to a rank, on which this one has said who it is."""
    port, _, address = published.split(" ", 2)
    try:
        one = socket.create_connection((address, int(port)), max(0.001, deadline_s - time.monotonic()))
        one.sendall(_HELLO.pack(rank, _proof_of(published)))
    except OSError as error:
        why = f"{address} port {port}: {error}"
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(address).is_loopback:
                why += (
                    "; if it is on another host, that host's name is one of loopback there (/etc/hosts): set "
                    "GLOO_SOCKET_IFNAME on it to the interface that leads to the others, or MASTER_ADDR to its address"
                )
        raise _unreachable(peer, why) from error
    return one


def _answer(one: socket.socket, deadline_s: float) -> bytes | None:
    """Return what the called rank proves itself with; None where it has hung up, or is too late."""
    said = b""
    try:
        while len(said) < _PROOF_NBYTES:
            one.settimeout(max(0.001, deadline_s - time.monotonic()))
            piece = one.recv(_PROOF_NBYTES - len(said))
            if not piece:
                return None
            said += piece
    except OSError:
        return None
    return said


def _proof_of(published: str) -> bytes:
    return bytes.fromhex(published.split(" ", 2)[1])


def _callers(
    listener: socket.socket, awaited: Sequence[int], mine: bytes, deadline_s: float
) -> dict[int, socket.socket]:
    """Return the connections of the ranks that call; strangers are dropped, and none of them is waited for."""
    found: dict[int, socket.socket] = {}
    strangers: dict[int, tuple[socket.socket, bytearray]] = {}
    ready = select.poll()
    ready.register(listener.fileno(), select.POLLIN)
    listener.setblocking(False)
    try:
        while missing := [one for one in awaited if one not in found]:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise _unreachable(missing[0], "it has not connected in time")
            for descriptor, _ in ready.poll(left_s * 1e3):
                if descriptor == listener.fileno():
                    _accept(listener, ready, strangers)
                    continue
                if descriptor not in strangers:  # dropped in this round
                    continue
                one, said = strangers[descriptor]
                try:
                    piece = one.recv(_HELLO.size - len(said))
                except BlockingIOError:
                    continue
                except OSError:
                    piece = b""
                said += piece
                if piece and len(said) < _HELLO.size:
                    continue
                ready.unregister(descriptor)
                del strangers[descriptor]
                who, proof = _HELLO.unpack(said) if len(said) == _HELLO.size else (-1, b"")
                if who in missing and who not in found and hmac.compare_digest(proof, mine):
                    one.setblocking(True)
                    found[who] = one
                else:
                    one.close()
    except BaseException:
        for one in found.values():
            one.close()
        raise
    finally:
        for one, _ in strangers.values():
            one.close()
    return found


def _accept(
    listener: socket.socket, ready: "select.poll", strangers: dict[int, tuple[socket.socket, bytearray]]
) -> None:
    try:
        one, _ = listener.accept()
    except OSError:  # gone again, or no descriptor is left
        return
    one.setblocking(False)
    if len(strangers) >= _STRANGERS:
        oldest = next(iter(strangers))
        ready.unregister(oldest)
        strangers.pop(oldest)[0].close()
    strangers[one.fileno()] = one, bytearray()
    ready.register(one.fileno(), select.POLLIN)


def _unreachable(peer: int, why: str) -> CommError:
    error = CommError(f"rank {peer} of the group cannot be reached: {why}")
    error.peer = peer
    return error


def _view(flat: torch.Tensor) -> memoryview:
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)
