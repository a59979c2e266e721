"""How ranks find each other where no other reads or writes: in a private file, or a store that asks for a secret.

Torch's "env://" opens a TCPStore, which listens on all addresses of a host, asks nobody who he is, and tells and takes
whatever it is asked: whoever reaches it can lead ranks to his own memory and sockets. Ranks of one launcher need no
network to meet: they share a file system. Others share the job's secret.
"""

import contextlib
import errno
import functools
import ipaddress
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

if TYPE_CHECKING:
    from .secret_store import StoreServer

VARIABLE = "HOCKET_RENDEZVOUS"
"""`MASTER_ADDR:MASTER_PORT PLACE`: the file, or `tcp://HOST:PORT/PREFIX`, that serves instead of a store there."""

SECRET_VARIABLE = "HOCKET_SECRET"
SECRET_FILE_VARIABLE = "HOCKET_SECRET_FILE"
_LEAST_SECRET_NBYTES = 16
_SAY_SECRET = f"give all hosts one file: {SECRET_FILE_VARIABLE}=FILE"
_CAME = ".came-"  # between the name of the file where the ranks of one host meet, and the number of one that has come
_LOOK_S = 1.0  # for a launcher to reach the store where ranks of several hosts meet
_served: "dict[str, StoreServer]" = {}  # of this process, as rank 0 without a launcher


class NoSecretError(ValueError):
    """A secret that cannot be used; the message says what to do."""


def job_secret() -> bytes | None:
    """Return the secret that all ranks share: HOCKET_SECRET, or what HOCKET_SECRET_FILE holds; None if neither.

    Raises:
        NoSecretError: It is too short, or others may read the file.
    """
    text, path = os.environ.get(SECRET_VARIABLE), os.environ.get(SECRET_FILE_VARIABLE)
    if text:
        return _long_enough(text.encode())
    return read_secret(path) if path else None


def read_secret(path: str) -> bytes:
    """Return what a file with a secret holds.

    Raises:
        NoSecretError: It cannot be read, others may read it, or it is too short.
    """
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(1 << 16).strip()
    except OSError as error:
        raise NoSecretError(f"the secret's file {path!r} cannot be read: {error.strerror}") from None
    # A group may read what is another user's: so Kubernetes hands secrets to those who are not root.
    if found.st_mode & (0o077 if found.st_uid == os.geteuid() else 0o027):
        raise NoSecretError(
            f"the secret's file {path!r} is open to others (mode {found.st_mode & 0o777:o}); chmod it to 600"
        )
    return _long_enough(text)


def _long_enough(text: bytes) -> bytes:
    if len(text) < _LEAST_SECRET_NBYTES:
        raise NoSecretError(f"the job's secret has {len(text)} characters; {_LEAST_SECRET_NBYTES} is the least")
    return text


def own_secret_file() -> str:
    """Return this user's file with a secret for jobs on several hosts: ~/.config/hocket/secret, made at the first call.

    Hosts that share home directories share it.

    Raises:
        NoSecretError: This user has no home directory, or cannot write there.
    """
    directory = os.path.join(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "hocket")
    path = os.path.join(directory, "secret")
    if directory.startswith("~"):
        raise NoSecretError(f"this user (number {os.getuid()}) has no home directory for a secret; {_SAY_SECRET}")
    if not os.path.exists(path):
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            draft = f"{path}.{secrets.token_hex(4)}"
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32) + "\n")
            with contextlib.suppress(FileExistsError):  # another launcher was first: its secret is it
                os.link(draft, path)
            os.unlink(draft)
        except OSError as error:
            raise NoSecretError(f"no secret can be made in {directory}: {error.strerror}; {_SAY_SECRET}") from None
    return path


def serve(host: str, port: int, secret: bytes, *, anyhow: bool = True) -> "StoreServer":
    """Serve a store at a host's name or address.

    Only there, unless the name leads to the loopback on this host itself (as Debian's /etc/hosts has it), or the
    address is none of this host's (that of a Kubernetes service, say) and it is to be served `anyhow`.

    Raises:
        OSError: Somebody listens there already, the name does not resolve, or the address is another host's.
    """
    from .secret_store import StoreServer

    address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    if ipaddress.ip_address(address).is_loopback and host != "localhost" and host.strip("[]") != address:
        address = "0.0.0.0"
    try:
        return StoreServer((address, port), secret)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL or not anyhow:
            raise
        return StoreServer(("0.0.0.0", port), secret)


def environment(address: str, port: int | str, path: str) -> dict[str, str]:
    """Return the variables by which ranks meet in a file, whatever program they run.

    A program that sets another MASTER_ADDR or MASTER_PORT, for a world of its own, gets a store of torch's there.

    Args:
        address: What MASTER_ADDR is.
        port: What MASTER_PORT is.
        path: A file that is not there yet, in a directory that only this user can enter; or `tcp://HOST:PORT/PREFIX`
            where a store listens that asks for the job's secret.
    """
    # No launcher has a store at that port: who does not know of the file opens one there, as with `python` alone.
    plain = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return {**plain, VARIABLE: f"{address}:{port} {path}"}


def came(place: str, world: int, secret: bytes | None = None) -> set[int]:
    """Return the ranks that have come to where all ranks of a job meet, whether or not the others have, too.

    Args:
        place: Where they meet, as `environment` was told.
        world: How many they are.
        secret: The job's, where they meet in a store; nobody has come to one that is not reached.
    """
    if place.startswith("tcp://"):
        try:
            store = _seen(place, secret)
            said = store.get(_CAME).decode().split() if store.check([_CAME]) else []
        except (OSError, RuntimeError):
            return set()
        return {int(rank) for rank, _, size in (word.partition("/") for word in said) if int(size) == world}
    directory, name = os.path.split(place + _CAME)
    return {int(file.removeprefix(name)) for file in os.listdir(directory) if file.startswith(name)}


def check_private(directory: str) -> None:
    """See to it that no other user can read or write in a directory.

    Raises:
        PermissionError: It is another user's, or open to others, or not a directory.
    """
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} is not a directory of this user alone (mode 0700); ranks do not meet there")


def take_over() -> None:
    """Have torch's "env://" use the launcher's file, where there is one."""
    from . import torch_adapter

    torch_adapter.replace_rendezvous("env", _rendezvous)


def _rendezvous(torchs: Any, url: str, timeout: timedelta = timedelta(minutes=5), **options: Any) -> Iterator[Any]:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    where, _, place = os.environ.get(VARIABLE, "").partition(" ")
    query = {**os.environ, **{key.upper(): values[0] for key, values in parse_qs(urlparse(url).query).items()}}
    complete = address and port and {"RANK", "WORLD_SIZE"} <= query.keys()
    secret = job_secret()
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's store, which knows of no secret
    if not complete or where != f"{address}:{port}" and (secret is None or agents):
        for met in torchs(url, timeout=timeout, **options):
            _keep_alive(port)
            yield met
        return
    assert address is not None
    rank = int(query["RANK"])
    if where != f"{address}:{port}":
        place = f"tcp://{f'[{address}]' if ':' in address else address}:{port}/"
        if rank == 0 and place not in _served:
            _served[place] = serve(address, int(port or 0), secret or b"")
    if place.startswith("tcp://"):
        from .timeouts import timeout_setting

        store = _far(place, secret, timeout, timeout_setting() or timeout.total_seconds())
        store.append(_CAME, f"{rank}/{query['WORLD_SIZE']} ")  # for the launchers, who see which ranks end
        yield store, rank, int(query["WORLD_SIZE"])
    else:
        from . import torch_adapter

        check_private(os.path.dirname(place))
        if query["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE"):  # for the launcher, who sees which ranks end
            open(f"{place}{_CAME}{rank}", "w").close()
        yield torch_adapter.FileStore(place), rank, int(query["WORLD_SIZE"])
    raise RuntimeError("the ranks of a launcher meet once; start them again for another world")


def _keep_alive(port: str | None) -> None:
    """Have connections to torch's store last, which asks nobody by itself whether they do."""
    from .engines import own_sockets
    from .keep_alive import keep_alive

    with contextlib.suppress(OSError):  # there is no /proc
        for one in own_sockets()[1]:
            with contextlib.suppress(OSError), one.borrowed() as found:  # another thread has closed it
                if str(found.getpeername()[1]) == port:
                    keep_alive(found)


@functools.cache
def _seen(place: str, secret: bytes | None) -> Any:
    return _far(place, secret, timedelta(seconds=_LOOK_S))


def _far(place: str, secret: bytes | None, timeout: timedelta, answer_s: float | None = None) -> Any:
    from . import torch_adapter
    from .secret_store import SecretStore

    if secret is None:
        raise NoSecretError(f"ranks meet at {place} by the job's secret; set HOCKET_SECRET_FILE")
    found = urlparse(place)
    store = SecretStore(found.hostname or "", found.port or 0, secret, timeout.total_seconds(), answer_s)
    return torch_adapter.PrefixStore(f"ranks{found.path}", store)
