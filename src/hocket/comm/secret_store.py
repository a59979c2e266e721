"""A store for ranks of several hosts that serves only who holds the job's secret; no byte of others is acted on.

It does what torch's TCPStore does, for who has proved himself: by HMAC-SHA256 over random numbers of both sides, as at
the aggregator. Its frames are lengths and bytes; nothing in them is ever unpickled.
"""

import asyncio
import contextlib
import errno
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from . import torch_adapter
from .keep_alive import give_up_after, keep_alive

_NONCE_NBYTES: Final = 32
_PROVE_S: Final = 10.0
_STRANGERS: Final = 256  # connections at once that have not proved themselves; the next takes the oldest one's place
_REFUSALS: Final = 5  # after so many a client believes that the secrets differ
_MOST_NBYTES: Final = 1 << 28
_CUT: Final = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ETIMEDOUT}
_IF_CUT: Final = "that host does not answer: look whether it runs, and at the network between (`hocket doctor`)"
_IF_ENDED: Final = "the launcher there, or rank 0, has ended, and says why"
_kept: list[Any] = []  # torch's C++ calls stores that Python may have forgotten


class SecretError(ConnectionError):
    """The other side does not hold this job's secret."""


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, b"hocket store " + role + first + second, "sha256")


def _packed(fields: Sequence[bytes]) -> bytes:
    body = b"".join(struct.pack("<I", len(field)) + field for field in fields)
    return struct.pack("<I", len(body)) + body


def _unpacked(body: bytes) -> list[bytes]:
    fields, place = [], 0
    while place < len(body):
        (size,) = struct.unpack_from("<I", body, place)
        fields.append(body[place + 4 : place + 4 + size])
        place += 4 + size
    return fields


class StoreServer:
    """Serves one job's keys from a thread of this process, on one address.

    Args:
        address: Host and port; port 0 for any that is free.
        secret: What clients must hold.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._secret = secret
        self._values: dict[bytes, bytes] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        """Where it listens."""
        self._changed: asyncio.Condition
        self._ended: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(begun)), name="hocket-store", daemon=True)
        self._thread.start()
        begun.wait()

    def close(self) -> None:
        """Serve nobody any more."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    async def _run(self, begun: threading.Event) -> None:
        self._loop, self._changed, self._ended = asyncio.get_running_loop(), asyncio.Condition(), asyncio.Event()
        server = await asyncio.start_server(self._meet, sock=self._listener, limit=4 * _NONCE_NBYTES, backlog=1024)
        begun.set()
        await self._ended.wait()
        server.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._strangers[writer] = None
        if len(self._strangers) > _STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        try:
            known = await asyncio.wait_for(self._proved(reader, writer), _PROVE_S)
            self._strangers.pop(writer, None)
            keep_alive(writer.get_extra_info("socket"))
            while known:
                (size,) = struct.unpack("<I", await reader.readexactly(4))
                if size > _MOST_NBYTES:
                    break
                fields = _unpacked(await reader.readexactly(size))
                writer.write(_packed(await self._answer(fields)))
                await writer.drain()
        except (OSError, EOFError, TimeoutError, struct.error, asyncio.CancelledError):
            pass
        finally:
            self._strangers.pop(writer, None)
            writer.close()

    async def _proved(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        mine = secrets.token_bytes(_NONCE_NBYTES)
        writer.write(mine)
        theirs = await reader.readexactly(_NONCE_NBYTES)
        proof = await reader.readexactly(_NONCE_NBYTES)
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", mine, theirs)):
            return False
        writer.write(_proof(self._secret, b"server", theirs, mine))
        return True

    async def _answer(self, fields: list[bytes]) -> list[bytes]:
        """Carry out one request: its name, and what it needs; values come back, or who waits for too long gets none."""
        what, *rest = fields
        values = self._values
        if what == b"get":  # time-out in seconds, keys
            timeout_s, keys = float(rest[0]), rest[1:]
            async with self._changed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait_for(lambda: all(k in values for k in keys)), timeout_s)
            return [b"ok", *(values[k] for k in keys)] if all(k in values for k in keys) else [b"late"]
        if what == b"check":
            return [b"ok", b"1" if all(k in values for k in rest) else b"0"]
        if what == b"count":
            return [b"ok", str(len(values)).encode()]
        if what == b"keys":
            return [b"ok", *values]
        if what == b"delete":
            return [b"ok", b"0" if values.pop(rest[0], None) is None else b"1"]
        result: list[bytes] = []
        if what == b"set":
            values.update(zip(rest[::2], rest[1::2], strict=True))
        elif what == b"append":
            values[rest[0]] = values.get(rest[0], b"") + rest[1]
        elif what == b"add":
            values[rest[0]] = str(int(values.get(rest[0], b"0")) + int(rest[1])).encode()
            result = [values[rest[0]]]
        elif what == b"swap":
            key, expected, wanted = rest
            if values.get(key, b"") == expected:
                values[key] = wanted
            result = [values.get(key, expected)]
        else:
            return [b"unknown"]
        async with self._changed:
            self._changed.notify_all()
        return [b"ok", *result]


class SecretStore(torch_adapter.Store):  # type: ignore[misc]
    """A torch store whose values a `StoreServer` keeps.

    Args:
        host: Where the server listens: its name or address.
        port: Its port.
        secret: The job's secret.
        timeout_s: How long to wait for the server, and for keys unless told otherwise.
        answer_s: How long the server may be cut off while it is asked; None for ten minutes.

    Raises:
        SecretError: The server does not hold the same secret.
        OSError: It cannot be reached, or does not answer.
    """

    def __init__(
        self, host: str, port: int, secret: bytes, timeout_s: float = 300.0, answer_s: float | None = None
    ) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._joining = (host, port, secret, timeout_s, answer_s)
        self._answer_s = answer_s
        self._where = f"{host}:{port}"
        self._lock = threading.Lock()
        self._socket = self._joined(host, port, secret, timeout_s)
        _kept.append(self)

    def _joined(self, host: str, port: int, secret: bytes, timeout_s: float) -> socket.socket:
        """Return a connection on which both sides have proved themselves.

        A flood of strangers may take our place before we have proved ourselves: then we try again.
        """
        end_s = time.monotonic() + timeout_s
        refused = 0
        while True:
            self._socket = _connected(host, port, max(0.0, end_s - time.monotonic()))
            try:
                self._socket.settimeout(_PROVE_S)
                if self._prove(secret):
                    self._socket.settimeout(None)
                    keep_alive(self._socket)
                    return self._socket
                refused += 1
                error: OSError = SecretError(
                    f"the store at {self._where} does not hold this job's secret; give all hosts the same "
                    "HOCKET_SECRET_FILE. If they have it, another program listens there: choose another port"
                )
            except OSError as trouble:
                error = ConnectionError(
                    f"who listens at {self._where} does not answer as this job's store ({trouble}); if it is another "
                    "program, choose another port"
                )
            self._socket.close()
            if refused == _REFUSALS or time.monotonic() > end_s:
                raise error
            time.sleep(0.05)

    def _prove(self, secret: bytes) -> bool:
        theirs, mine = self._received(_NONCE_NBYTES), secrets.token_bytes(_NONCE_NBYTES)
        self._socket.sendall(mine + _proof(secret, b"client", theirs, mine))
        try:
            return hmac.compare_digest(self._received(_NONCE_NBYTES), _proof(secret, b"server", mine, theirs))
        except OSError:  # so it says no, or we have been taken for a stranger who waits for too long
            return False

    def _received(self, nbytes: int) -> bytes:
        pieces = bytearray()
        while len(pieces) < nbytes:
            piece = self._socket.recv(nbytes - len(pieces))
            if not piece:
                raise ConnectionError(f"the store at {self._where} has gone")
            pieces += piece
        return bytes(pieces)

    def _ask(self, what: bytes, *fields: str | bytes) -> list[bytes]:
        request = _packed([what, *(f.encode() if isinstance(f, str) else bytes(f) for f in fields)])
        waits_s = self._answer_s and max(self._answer_s, float(fields[0]) if what == b"get" else 0.0)
        try:
            with self._lock:
                # Who is cut off waits no longer than its time-out, who asks nothing until the link is there again.
                give_up_after(self._socket, waits_s)
                self._socket.sendall(request)
                (size,) = struct.unpack("<I", self._received(4))
                said, *values = _unpacked(self._received(size))
                give_up_after(self._socket, None)
        except OSError as error:
            why = f"{error}; {_IF_CUT if error.errno in _CUT else _IF_ENDED}"
            raise torch_adapter.DistNetworkError(f"the store at {self._where} cannot be reached: {why}") from None
        if said == b"late":
            raise torch_adapter.DistStoreError(f"waited {fields[0]!s} s for keys {fields[1:]} of {self._where}")
        if said != b"ok":
            raise torch_adapter.DistStoreError(f"the store at {self._where} does not know {what!r}")
        return values

    # --- what torch calls; its C++ knows some of them by other names -------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:  # noqa: D102
        self._ask(b"set", key, value)

    def get(self, key: str) -> bytes:  # noqa: D102
        return self._ask(b"get", str(self.timeout.total_seconds()), key)[0]

    def add(self, key: str, amount: int) -> int:  # noqa: D102
        return int(self._ask(b"add", key, str(amount))[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:  # noqa: D102
        return self._ask(b"swap", key, expected, desired)[0]

    def check(self, keys: Sequence[str]) -> bool:  # noqa: D102
        return self._ask(b"check", *keys)[0] == b"1"

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: D102
        self._ask(b"get", str((timeout or self.timeout).total_seconds()), *keys)

    def delete_key(self, key: str) -> bool:  # noqa: D102
        return self._ask(b"delete", key)[0] == b"1"

    def num_keys(self) -> int:  # noqa: D102
        return int(self._ask(b"count")[0])

    def append(self, key: str, value: str | bytes) -> None:  # noqa: D102
        self._ask(b"append", key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:  # noqa: D102
        return self._ask(b"get", str(self.timeout.total_seconds()), *keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:  # noqa: D102
        self._ask(b"set", *(field for pair in zip(keys, values, strict=True) for field in pair))

    def clone(self) -> "SecretStore":  # noqa: D102
        return SecretStore(*self._joining)

    def has_extended_api(self) -> bool:  # noqa: D102
        return True

    deleteKey, getNumKeys, compareSet = delete_key, num_keys, compare_set  # noqa: N815
    multiGet, multiSet, hasExtendedApi = multi_get, multi_set, has_extended_api  # noqa: N815


def _connected(host: str, port: int, timeout_s: float) -> socket.socket:
    """Return a connection, once somebody listens there."""
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            found = socket.create_connection((host, port), timeout=max(0.1, end_s - time.monotonic()))
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return found
        except OSError as error:
            if time.monotonic() > end_s:
                raise ConnectionError(
                    f"nobody answers at {host}:{port} ({error}), where the ranks meet: see whether rank 0 runs there "
                    "and all hosts have the same MASTER_ADDR and MASTER_PORT, and let firewalls pass that port"
                ) from error
            time.sleep(0.05)
