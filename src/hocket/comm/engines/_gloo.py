"""Gloo for one group: made when it is first needed, its connections proved, its listening sockets closed to others."""

import atexit
import contextlib
import functools
import hmac
import os
import re
import secrets
import select
import socket
import threading
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch

from .. import torch_adapter as c10d
from ..transport import CommError
from ._direct import DirectPoints, keep_alive

_PROOF_TAG: Final = 0x686F636B  # the first messages on each connection; nothing else is under way yet
_PROOF_NBYTES: Final = 32


_END_S: Final = 1.0
_connected: "weakref.WeakSet[Gloo]" = weakref.WeakSet()
_ending, _ended = threading.Event(), threading.Event()


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
        self._connections: dict[int, int] = {}  # numbers of its descriptors, and which socket each was
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
                loopback = self.loopback and "GLOO_SOCKET_IFNAME" not in os.environ
                before = _sockets()
                engine = c10d.process_group_gloo(self._store, self._rank, self._size, self._timeout, loopback)
                if self._size > 1:
                    self._prove(engine)
                listening, connected = (now - then for now, then in zip(_sockets(), before, strict=True))
                for descriptor in connected:
                    with socket.socket(fileno=os.dup(descriptor)) as one:
                        keep_alive(one)
                self._connections = {descriptor: _socket_number(descriptor) for descriptor in connected}
                self.address = next(filter(None, map(_address, sorted(listening))), None)
                for descriptor in listening:
                    _take_no_more(descriptor)
                self._engine = engine
                _connected.add(self)
                _ender()
            return self._engine

    def alone(self) -> bool:
        """Return whether all connections have ended: Gloo, which does not say so, closes its end of each that has."""
        known = self._connections.items()
        return bool(known) and all(_socket_number(descriptor) != number for descriptor, number in known)

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

    def _prove(self, engine: Any) -> None:
        mine = secrets.token_bytes(_PROOF_NBYTES)
        self._store.set(f"proof/{self._rank}", mine.hex())
        others = [rank for rank in range(self._size) if rank != self._rank]
        self._store.wait([f"proof/{rank}" for rank in others], self._timeout)
        works, came = [], {}
        for rank in others:
            theirs = bytes.fromhex(self._store.get(f"proof/{rank}").decode())
            sent = torch.frombuffer(bytearray(theirs), dtype=torch.uint8)
            came[rank] = torch.empty(_PROOF_NBYTES, dtype=torch.uint8)
            works += [engine.send([sent], rank, _PROOF_TAG), engine.recv([came[rank]], rank, _PROOF_TAG)]
        for work in works:
            work.wait(self._timeout)
        for rank, proof in came.items():
            if not hmac.compare_digest(proof.numpy().tobytes(), mine):
                raise CommError(
                    f"whoever connected as rank {rank} is not that rank: it has not read the group's store. Somebody "
                    "who does not belong to the job reaches its ports"
                )


def _sockets() -> tuple[set[int], set[int]]:
    """Return this process's descriptors of TCP sockets: those that listen on one address, as Gloo's do; the others."""
    listening, connected = set[int](), set[int]()
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    (listening if listens else connected).add(int(name))
        except OSError:  # another thread has closed it
            continue
    return listening, connected


def _socket_number(descriptor: int) -> int:
    """Return which socket a descriptor is of, a number that no other has meanwhile; -1 if it is closed."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return -1


def _address(descriptor: int) -> str | None:
    """Return the address of a listening socket, if others can be told of it."""
    with socket.socket(fileno=os.dup(descriptor)) as one:
        address = str(one.getsockname()[0])
    return None if "%" in address or address.startswith("fe80:") else address  # which need an interface beside


def _take_no_more(descriptor: int) -> None:
    """Close a listening socket of Gloo's; its connections go on.

    Gloo itself keeps it open, and each stranger's connection. Its number, which Gloo's thread waits for (epoll) until
    Gloo ends, is given to a socket at which nothing arrives. A packet filter would do, too, but some kernels
    refuse it to ordinary users.
    """
    listed = re.compile(rf"^tfd: +{descriptor} ", re.MULTILINE)  # see proc_pid_fdinfo(5)
    for name in os.listdir("/proc/self/fdinfo"):
        with contextlib.suppress(OSError):  # another thread has closed it
            if not listed.search(Path(f"/proc/self/fdinfo/{name}").read_text()):
                continue
            with (
                select.epoll.fromfd(os.dup(int(name))) as waiting,
                socket.socket(fileno=os.dup(descriptor)) as listener,
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as nothing,
            ):
                waiting.unregister(descriptor)
                with contextlib.suppress(OSError):  # a group that connects beside this one has closed it
                    listener.shutdown(socket.SHUT_RDWR)  # a process forked meanwhile may hold it, too
                os.dup2(nothing.fileno(), descriptor, inheritable=False)
                waiting.register(descriptor, 0)
