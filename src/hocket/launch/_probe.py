"""How fast one host of a job reaches another, measured over plain TCP before anything starts. Standard library only."""

import contextlib
import hmac
import socket
import statistics
import threading
import time
from collections import deque
from typing import Any

_CONNECT_S = 5.0
_SEND_S = 0.25
_MOST_S = 15.0  # for what is under way on a slow link to arrive
_BLOCK = bytes(1 << 16)
_PINGS = 15
_PAUSE_S = 0.05
_HELLO = b"hocket probe"
_STRANGERS = 64  # connections at once that have not said the secret; the next takes the oldest one's place


class ProbeServer:
    """Answers the job's other hosts at a free port until it is closed; who does not know the secret is cut off."""

    def __init__(self, secret: str) -> None:
        self._token = _token(secret)
        self._closed = False
        self._strangers: deque[socket.socket] = deque()
        self._server = listen()
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._serve, name="hocket-probe", daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed, or this process has too many files open
                time.sleep(_PAUSE_S)
                continue
            self._strangers.append(connection)
            if len(self._strangers) > _STRANGERS:
                with contextlib.suppress(OSError):
                    self._strangers.popleft().shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_MOST_S)
            known = hmac.compare_digest(_exactly(connection, 32), self._token)
            with contextlib.suppress(ValueError):
                self._strangers.remove(connection)
            if not known:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_PINGS):
                connection.sendall(_exactly(connection, 8))
            while connection.recv(1 << 20):
                pass
            connection.sendall(b"received")


def listen() -> socket.socket:
    """Return a socket that listens at a free port of all addresses of this host, of IPv6 too if it has that."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def probe(address: str, port: int, secret: str) -> dict[str, Any]:
    """Return the latency in seconds and the rate in bytes/s to another host, or under "problem" why there is none."""
    try:
        connection = socket.create_connection((address, port), timeout=_CONNECT_S)
    except OSError as error:
        return {"problem": str(error)}
    trips_s: list[float] = []
    with connection:
        try:
            connection.settimeout(_MOST_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
            connection.sendall(_token(secret))
            for _ in range(_PINGS):
                begin_s = time.perf_counter()
                connection.sendall(_BLOCK[:8])
                _exactly(connection, 8)
                trips_s.append(time.perf_counter() - begin_s)
            sent, begin_s = 0, time.perf_counter()
            while time.perf_counter() < begin_s + _SEND_S:
                connection.sendall(_BLOCK)
                sent += len(_BLOCK)
            connection.shutdown(socket.SHUT_WR)
            _exactly(connection, 8)
            rate_Bps = sent / (time.perf_counter() - begin_s)
        except TimeoutError:
            few = "short messages arrive and long ones do not, as where a link has a smaller MTU than its hosts take"
            return {"problem": few if len(trips_s) == _PINGS else "it does not answer"}
        except OSError as error:
            return {"problem": f"the connection breaks: {error}"}
    return {"problem": None, "latency_s": statistics.median(trips_s) / 2, "rate_Bps": rate_Bps}


def _token(secret: str) -> bytes:
    return hmac.digest(secret.encode(), _HELLO, "sha256")


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        chunk = connection.recv(nbytes - len(found))
        if not chunk:
            raise ConnectionResetError("closed by the other side")
        found += chunk
    return found
