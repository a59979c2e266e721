"""Gloo for one group: made when it is first needed, its connections proved, its listening sockets closed to others."""

import atexit
import contextlib
import functools
import hmac
import os
import secrets
import socket
import sys
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import wait
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch

from .. import torch_adapter as c10d
from ..keep_alive import keep_alive
from ..transport import CommError
from ._direct import DirectPoints
from ._sockets import (
    LOOPBACK,
    OwnSocket,
    address_of,
    is_at,
    is_bound_to,
    is_loopback,
    own_address,
    own_sockets,
    received_nbytes,
    take_no_more,
)

_PROOF_TAG: Final = 0x686F636B  # the first messages on each connection; nothing else is under way yet
_PROOF_NBYTES: Final = 32
_BY_NAMES: Final = (
    "Hosts connect by the address of their names, or of the interface that GLOO_SOCKET_IFNAME names: set it on each to "
    "one that leads to the others"
)
_NO_WAY: Final = ("connecting", "unreachable", "No route to host")  # in Gloo's errors, some of them the kernel's words
_SYN_SENT: Final = "02"  # TCP_SYN_SENT of the kernel's tcp_states.h
_DEVICE: Final = "0"  # of the first of Gloo's devices, the only one: what it keeps in the store has that before it
_LARGE_NBYTES: Final = 2**20  # beside whose time a thread's start, some 75 us, is little; less is seldom cut in two
_LOOK_S: Final = 0.3
_GRACE_S: Final = 2.0  # for the thread that waits to tell that a message was whole when its connection ended

_END_S: Final = 1.0
_connected: "weakref.WeakSet[Gloo]" = weakref.WeakSet()
_ending, _ended = threading.Event(), threading.Event()
_before: "list[set[OwnSocket]]" = []  # what listened before each group that connects now


@functools.cache
def _ender() -> threading.Thread:
    """Start the thread that ends engines when the process ends.

    A thread of Gloo's that drops its last hold of a tensor while the interpreter ends would abort the process
    (pytorch/pytorch#190489). Whoever drops an engine waits for its threads, for long if a peer does not come; hence
    another thread than the main one, which could not be started any more by then.
    """

    def end() -> None:
        _ending.wait()
        for gloo in list(_connected):
            gloo.end()
        _ended.set()

    thread = threading.Thread(target=end, name="hocket-end-gloo", daemon=True)
    thread.start()
    return thread


@atexit.register
def _end_all() -> None:
    if _connected and _ender().is_alive():  # a forked child does not have it
        _ending.set()
        _ended.wait(_END_S)


class Gloo:
    """Gloo over a group's store, made by `connect` or by the first operation, in which all ranks then take part.

    On one host, where shared memory serves, that is hardly ever, and until then nothing listens. Gloo takes whoever
    connects first for a rank. So each rank proves on each connection that it has read, in the group's store, what the
    other wrote there; then the listening socket takes no more connections.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.loopback = False  # whether all ranks are on this host, so that no other needs to reach them
        self.address: str | None = None  # where it listens, once it has connected
        self.beside: DirectPoints | None = None  # connections that end with this one's
        self._store = c10d.PrefixStore("gloo/", store)
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._lock = threading.Lock()
        self._engine: Any = None
        self._found: list[str] = []  # names of its methods that are attributes here
        self._connections: dict[int, OwnSocket] = {}  # by rank
        self._over = False

    def rank(self) -> int:
        """Return this process's number in the group."""
        return self._rank

    def size(self) -> int:
        """Return how many ranks the group has."""
        return self._size

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of operations posted from now on."""
        self._timeout = timeout
        if self._engine is not None:
            self._engine.set_timeout(timeout)

    def connect(self) -> Any:
        """Connect with all ranks, unless that has been done; return torch's engine.

        Raises:
            RuntimeError: This build of torch has no Gloo.
            CommError: Somebody else sits on a connection.
        """
        with self._lock:
            if self._over:
                raise CommError("the process ends: its connections to other ranks are closed")
            if self._engine is None:
                if not torch.distributed.is_gloo_available():
                    raise RuntimeError("the hocket backend needs Gloo inside torch; this build of torch has none")
                address = None if "GLOO_SOCKET_IFNAME" in os.environ else LOOPBACK if self.loopback else own_address()
                before = own_sockets()
                _before.append(before[0])
                try:
                    engine = c10d.process_group_gloo(self._store, self._rank, self._size, self._timeout, address)
                except RuntimeError as error:
                    if address is not None or not any(said in str(error) for said in _NO_WAY):
                        raise
                    raise RuntimeError(f"{error}. {_BY_NAMES}") from error
                finally:
                    _before.remove(before[0])
                new = (now - then for now, then in zip(own_sockets(), before, strict=True))
                listening, connected = self._own(*new)
                for one in connected:
                    with contextlib.suppress(OSError), one.borrowed() as connection:  # another thread's, and closed
                        keep_alive(connection)
                if self._size > 1:
                    self._prove(engine, connected)
                self.address = next(filter(None, map(address_of, sorted(listening))), None)
                for one in listening:
                    take_no_more(one)
                self._engine = engine
                _connected.add(self)
                _ender()
            return self._engine

    def alone(self) -> bool:
        """Return whether all connections have ended: Gloo, which does not say so, closes its end of each that has."""
        return bool(self._connections) and all(map(self.gone, self._connections))

    def gone(self, peer: int) -> bool:
        """Return whether the connection to a rank is known to have ended, and all that came by it has been taken."""
        return peer in self._connections and not self._connections[peer].still()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """Post a send."""
        return self._message(self.connect().send(tensors, peer, tag), tensors, peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """Post a receive."""
        return self._message(self.connect().recv(tensors, peer, tag), tensors, peer)

    def _message(self, work: Any, tensors: list[torch.Tensor], peer: int) -> Any:
        return _LargeMessage(self, work, peer) if tensors[0].nbytes >= _LARGE_NBYTES else work

    def close(self) -> None:
        """Close the connections, if there are any: peers that wait for this rank hear of it."""
        with self._lock:
            if self.beside is not None:
                self.beside.close()
            if self._engine is not None:
                self._engine.abort()

    def end(self) -> None:
        """Let go of the engine, which waits for its threads."""
        with self._lock:
            self._over, engine, self._engine = True, self._engine, None
            for name in self._found:
                vars(self).pop(name, None)
        del engine

    def missing(self, timeout: timedelta) -> list[int]:
        """Return the ranks that have not come here within a time, if the first operation is still to come; else none.

        Args:
            timeout: How long to wait.
        """
        if self._engine is not None:
            return []
        self._store.set(f"here/{self._rank}", "")
        try:
            self._store.wait([f"here/{rank}" for rank in range(self._size)], max(timeout, timedelta(milliseconds=1)))
        except RuntimeError:
            return [rank for rank in range(self._size) if not self._store.check([f"here/{rank}"])]
        return []

    def __getattr__(self, name: str) -> Any:
        # What torch asks of every backend is answered without connecting: one rank may be alone in asking.
        value = False if name.startswith("supports_") else getattr(self.connect(), name)
        self._found.append(name)
        setattr(self, name, value)  # the next time it is found at once
        return value

    def _own(self, listening: set[OwnSocket], connected: set[OwnSocket]) -> tuple[set[OwnSocket], set[OwnSocket]]:
        """Return those of new sockets that are this group's: of another, or the program's, a thread may have made some.

        Gloo writes to the store where each rank listens. Where it does not (another version of torch), all are.
        """
        keys = [f"{_DEVICE}/{rank}" for rank in range(self._size)]
        if not self._store.check(keys):
            return listening, connected
        places = [self._store.get(key) for key in keys]
        mine = {one for one in listening if is_at(places[self._rank], one)}
        accepted = {one for one in connected if is_at(places[self._rank], one)}
        made = {one for one in connected if any(is_at(place, one, there=True) for place in places)}
        return mine, accepted | made

    def _prove(self, engine: Any, connected: Iterable[OwnSocket]) -> None:
        before = {one: received_nbytes(one) for one in connected}
        mine = secrets.token_bytes(_PROOF_NBYTES)
        self._store.set(f"proof/{self._rank}", mine.hex())
        others = [rank for rank in range(self._size) if rank != self._rank]
        self._store.wait([f"proof/{rank}" for rank in others], self._timeout)
        works, came = [], {}
        for rank in others:
            theirs = bytes.fromhex(self._store.get(f"proof/{rank}").decode())
            # Each rank sends a byte more than the one before it, by which the others know its connection.
            sent = torch.frombuffer(bytearray(theirs + bytes(self._rank)), dtype=torch.uint8)
            came[rank] = torch.empty(_PROOF_NBYTES + rank, dtype=torch.uint8)
            works += [engine.send([sent], rank, _PROOF_TAG), engine.recv([came[rank]], rank, _PROOF_TAG)]
        for work in works:
            work.wait(self._timeout)
        for rank, proof in came.items():
            if not hmac.compare_digest(proof.numpy().tobytes()[:_PROOF_NBYTES], mine):
                raise CommError(
                    f"whoever connected as rank {rank} is not that rank: it has not read the group's store. Somebody "
                    "who does not belong to the job reaches its ports"
                )
        nbytes = {received_nbytes(one) - then: one for one, then in before.items()}
        rest = min(nbytes, default=0) - min(others)  # what all send: the secret, and Gloo's head
        found = {received - rest: one for received, one in nbytes.items()}
        if len(before) == len(others) and found.keys() == set(others):
            self._connections = found


class _LargeMessage:
    """A message that ends with its connection; in the middle of one Gloo's own waits on for its time-out."""

    def __init__(self, gloo: Gloo, work: Any, peer: int) -> None:
        self.is_completed = work.is_completed
        self._gloo, self._work, self._peer = gloo, work, peer

    def wait(self, timeout: timedelta) -> Any:
        """See torch's Work; ConnectionError where the connection has ended."""
        try:
            came = c10d.begun(lambda: self._work.wait(timeout))
        except RuntimeError:  # there are too many threads
            return self._work.wait(timeout)
        while True:
            try:
                return came.result(_LOOK_S)
            except TimeoutError:
                if came.done():
                    return came.result()
                if self._gloo.gone(self._peer) and not wait([came], _GRACE_S).done:
                    raise ConnectionError("the connection has ended in the middle of the message") from None


def unanswered() -> str:
    """Return what to say where this process asks again and again for a connection without an answer; else "".

    A firewall that drops packets is silent, and Gloo tries for its time-out.
    """
    own, found = set(), []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # another thread has closed it
            own.add(os.readlink(f"/proc/self/fd/{name}"))
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        with contextlib.suppress(OSError):  # a host without IPv6
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:  # see proc_pid_net(5)
                _, _, there, state, _, _, again, _, _, number, *_ = line.split()
                if state == _SYN_SENT and int(again, 16) > 1 and f"socket:[{number}]" in own:
                    words, port = there.split(":")
                    packed = b"".join(
                        int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8)
                    )
                    found.append(f"{socket.inet_ntop(family, packed)}, port {int(port, 16)}")
    if not found:
        return ""
    places = " and ".join(sorted(set(found)))
    return f"no answer from {places}; if that is a host of this job, a firewall may be between. {_BY_NAMES}"


def unheard() -> str:
    """Return what to say where this process listens for the ranks of a group and none has come; else "".

    Of two ranks one listens and the other connects; a firewall between leaves the first one without any sign.
    """
    before = list(_before)
    listening, connected = own_sockets()
    new = listening.difference(*before)
    if len(before) != 1 or len(new) != 1:  # several groups at once, or the program has begun to listen, too
        return ""
    with contextlib.suppress(OSError), new.pop().borrowed() as found:
        address, port, *_ = place = found.getsockname()
        if not is_loopback(address) and not any(is_bound_to(one, place) for one in connected):
            return (
                f"nobody has connected to {address}, port {port}, where this rank listens; if others try, a firewall "
                f"may be between. {_BY_NAMES}"
            )
    return ""
