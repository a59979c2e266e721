"""This process's TCP sockets, and where this host is reached: what Gloo chooses and holds, and does not tell."""

import contextlib
import errno
import fcntl
import ipaddress
import os
import re
import select
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

LOOPBACK: Final = "127.0.0.1"
_SIOCGIFADDR: Final = 0x8915  # <linux/sockios.h>
_closing = threading.Lock()  # of listening sockets: groups that connect at once see each other's


def own_address() -> str | None:
    """Return this host's address towards others where its name has none but loopback, as Debian's /etc/hosts has it.

    None where Gloo's own choice, the first address of the name, serves. Asked for are the interface that leads to rank
    0 and, on the host that has that name itself, that of the default route; without one, as in a closed network, the
    only address that there is. Of a name's several addresses (nss-myhostname gives all of the host, containers'
    bridges first) it is the one that leads to rank 0.
    """
    name, place = socket.gethostname(), os.environ.get("MASTER_ADDR", LOOPBACK)
    with contextlib.suppress(OSError):
        named = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
        family, *_, there = named[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(there)  # else Gloo, too, goes to loopback
            if not is_loopback(there[0]):
                others = {str(one[4][0]) for one in named[1:] if one[0] == family} - {there[0]}
                return towards if others and (towards := _towards(place)) in others else None
    for other in (place, "192.0.2.1", "2001:db8::1") if place == name else (place,):  # RFC 5737, RFC 3849: nobody's
        if address := _towards(other):
            return address
    return _only_address() if place == name else None


def _towards(other: str) -> str | None:
    """Return this host's address on its way to another host; None where that is loopback, or there is no way."""
    with contextlib.suppress(OSError):
        family, *_, there = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # sends nothing
            if not is_loopback(address := probe.getsockname()[0]):
                return str(address)
    return None


def _only_address() -> str | None:
    """Return this host's address where it has a single one of IPv4 besides loopback's; None else."""
    found = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address, say
                reply = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.add(socket.inet_ntoa(reply[20:24]))
    outside = [one for one in found if not is_loopback(one)]
    return outside[0] if len(outside) == 1 else None


def is_loopback(address: Any) -> bool:
    """Return whether an address is one that only this host reaches."""
    return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback


class OwnSocket(NamedTuple):
    """A socket of this process, which another thread may close at any time: its descriptor, and which socket it is."""

    descriptor: int
    number: int  # that no other has meanwhile, while descriptors are soon given to others

    def still(self) -> bool:
        """Return whether the descriptor is this socket's."""
        try:
            return os.fstat(self.descriptor).st_ino == self.number
        except OSError:
            return False

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[socket.socket]:
        """Give Python's object of it, with no descriptor beside its own, which another thread would take for one more.

        Raises:
            OSError: It is closed.
        """
        if not self.still():
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        found = socket.socket(fileno=self.descriptor)
        try:
            yield found
        finally:
            found.detach()


def own_sockets() -> tuple[set[OwnSocket], set[OwnSocket]]:
    """Return this process's TCP sockets: those that listen on one address, as Gloo's do; the others."""
    listening, connected = set[OwnSocket](), set[OwnSocket]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # another thread has closed it
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            one = OwnSocket(int(name), os.fstat(int(name)).st_ino)
            with one.borrowed() as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    (listening if listens else connected).add(one)
    return listening, connected


def is_bound_to(one: OwnSocket, place: Any) -> bool:
    """Return whether a socket's own address is this one, in Python's words."""
    with contextlib.suppress(OSError), one.borrowed() as found:
        return bool(found.getsockname() == place)
    return False


def received_nbytes(one: OwnSocket) -> int:
    """Return how many bytes have come to a socket; none to one that is closed."""
    with contextlib.suppress(OSError), one.borrowed() as found:
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)  # struct tcp_info: tcpi_bytes_received
        return int.from_bytes(info[128:136], sys.byteorder)
    return 0


def is_at(place: bytes, one: OwnSocket, *, there: bool = False) -> bool:
    """Return whether a socket's address, or that of its other end, is in what Gloo has written: a `sockaddr` of C's."""
    with contextlib.suppress(OSError), one.borrowed() as found:
        address, port, *_ = found.getpeername() if there else found.getsockname()
        packed = socket.inet_pton(found.family, str(address).partition("%")[0])
        head = int(found.family).to_bytes(2, sys.byteorder) + int(port).to_bytes(2, "big")
        begin = place.find(head)
        return begin >= 0 and packed in place[begin + len(head) :]
    return False


def address_of(one: OwnSocket) -> str | None:
    """Return the address of a listening socket, if others can be told of it."""
    address = ""
    with contextlib.suppress(OSError), one.borrowed() as found:
        address = str(found.getsockname()[0])
    return None if "%" in address or address.startswith("fe80:") else address or None  # which need an interface beside


def take_no_more(one: OwnSocket) -> None:
    """Close a listening socket of Gloo's; its connections go on.

    Gloo itself keeps it open, and each stranger's connection. Its number, which Gloo's thread waits for (epoll) until
    Gloo ends, is given to a socket at which nothing arrives. A packet filter would do, too, but some kernels
    refuse it to ordinary users.
    """
    listed = re.compile(rf"^tfd: +{one.descriptor} ", re.MULTILINE)  # see proc_pid_fdinfo(5)
    for name in os.listdir("/proc/self/fdinfo"):
        with contextlib.suppress(OSError), _closing:  # another thread has closed it
            if not listed.search(Path(f"/proc/self/fdinfo/{name}").read_text()):
                continue
            with (
                select.epoll.fromfd(os.dup(int(name))) as waiting,
                one.borrowed() as listener,
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as nothing,
            ):
                waiting.unregister(one.descriptor)
                with contextlib.suppress(OSError):  # it ends by itself
                    listener.shutdown(socket.SHUT_RDWR)  # a process forked meanwhile may hold it, too
                os.dup2(nothing.fileno(), one.descriptor, inheritable=False)
                waiting.register(one.descriptor, 0)
