"""What the kernel says of this process's TCP connections: bytes acknowledged, and the time in which any were under way.

Both count from a connection's begin, for whatever library owns it (Gloo, NCCL over sockets, a store), so that reading
them now and then costs nothing in between. Bytes over that time are what a link gives while it is used, which tells a
slow link from ranks that send little.
"""

import contextlib
import os
import socket
import stat
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

_INFO = struct.Struct("<68xI28xI16xQ20xI16xQQ")
"""Of `struct tcp_info` (linux/tcp.h): rtt, total_retrans, bytes_acked, min_rtt, busy_time, rwnd_limited; in us."""


_LOST = struct.Struct("<2xB21xI28xI")
"""Of the same: retransmits (since anything was acknowledged), unacked (segments), last_ack_recv (ms ago)."""
_LEAST_TIMES = 4  # the kernel waits 0.2 s before it sends again, and then twice as long each time


@dataclass(slots=True)
class ConnectionUse:
    """What a process has sent to one host."""

    nbytes: int = 0  # bytes that were acknowledged
    busy_s: float = 0.0  # seconds in which some were under way and the receiver could take them, of all connections
    rtt_s: float = 0.0  # smoothed round trip of the connection that sent most
    least_rtt_s: float = 0.0  # the shortest round trip
    resent: int = 0  # segments that were sent again


@dataclass(frozen=True, slots=True)
class UndeliveredSegments:
    """What a process has sent to a host in vain."""

    peer: str  # address
    times: int  # how often it was sent again
    since_s: float  # seconds since that host has last acknowledged anything on that connection


def links_used() -> dict[tuple[str, str], ConnectionUse]:
    """Return what this process has sent to other hosts by TCP, by its own address and the peer's."""
    found: defaultdict[tuple[str, str], ConnectionUse] = defaultdict(ConnectionUse)
    most: dict[tuple[str, str], int] = {}
    for pair, info in _connections():
        rtt_us, resent, nbytes, least_us, busy_us, full_us = _INFO.unpack_from(info)
        use = found[pair]
        use.nbytes += nbytes
        use.busy_s += max(0, busy_us - full_us) * 1e-6
        use.resent += resent
        use.least_rtt_s = min(use.least_rtt_s or 1e9, least_us * 1e-6)
        if nbytes >= most.get(pair, 0):
            most[pair], use.rtt_s = nbytes, rtt_us * 1e-6
    return dict(found)


def undelivered() -> UndeliveredSegments | None:
    """Return what was sent again most often to another host, which has not acknowledged it; None where all goes on."""
    found = []
    for (_, peer), info in _connections():
        times, segments, last_ms = _LOST.unpack_from(info)
        if segments and times >= _LEAST_TIMES:
            found.append(UndeliveredSegments(peer, times, last_ms * 1e-3))
    return max(found, key=lambda one: one.times, default=None)


def _connections() -> Iterator[tuple[tuple[str, str], bytes]]:
    """Yield own and peer's address of each TCP connection of this process with another, and the kernel's tcp_info."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error):
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            connection = socket.socket(fileno=int(entry))
            try:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if connection.type != socket.SOCK_STREAM:
                    continue
                pair = connection.getsockname()[0], connection.getpeername()[0]
                if pair[0] == pair[1]:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            finally:
                connection.detach()  # it is another's
            yield pair, info
