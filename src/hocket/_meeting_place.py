"""Where the tasks of a job meet: the address and a port of rank 0's host, which all find where no launcher tells them.

Only the standard library is imported here.
"""

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import socket
import subprocess
import threading
import time
from collections import deque
from dataclasses import replace
from typing import Any

from ._tasks import LOCAL, LaunchedTask, TasksError, described, say_idle_components

_CANDIDATES = 8  # ports at which rank 0 may answer, should other jobs have the first of them
_FIRST_PORT, _PORTS = 15_000, 15_000  # below those that the kernel hands out
_PATIENCE_S = 300.0  # as long as torch's own stores wait; the tasks of a large job start over minutes
_REPLY_S = 2.0
_MOST_ANSWER = 256  # bytes of rank 0's answer
_ASKERS = 256  # at once; the next takes the oldest one's place, so that who asks nothing keeps nobody out


def adopt() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as the launcher's variables say.

    Does nothing where RANK is set, or where no tasks are described. All tasks must call it.

    Raises:
        TasksError: The tasks cannot find each other.
    """
    tasks = None if "RANK" in os.environ else described()
    if tasks is None:
        return
    address, port = meeting_place(tasks)
    os.environ.update(
        RANK=str(tasks.rank),
        WORLD_SIZE=str(tasks.size),
        LOCAL_RANK=str(tasks.local_rank),
        LOCAL_WORLD_SIZE=str(tasks.local_size),
        MASTER_ADDR=address,
        MASTER_PORT=port,
    )


def meeting_place(tasks: LaunchedTask) -> tuple[str, str]:
    """Return the address and port where the tasks meet, or raise TasksError; all of them must call it."""
    if tasks.launcher == "srun" and tasks.rank == 0:
        say_idle_components(os.environ)
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if tasks.size == 1:
        address, port = address or LOCAL, port or str(_free_port())
    elif address is None and tasks.host is None:
        address, port = _agree_by_mpi(tasks)
    if address is None and tasks.host == LOCAL and tasks.size > 1:
        address = _local_address()
    address = address or reachable(tasks.host or "")
    if port is None:
        port = str(_agree(replace(tasks, host=address)))
    return address, port


def _local_address() -> str:
    """Return an address at which tasks of this host reach each other: all of them find the same.

    Raises:
        TasksError: There is none; torch would try 127.0.0.1 for minutes.
    """
    for address in dict.fromkeys((LOCAL, "::1", _own_address(socket.gethostname()))):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.create_server((address, 0), family=family) as server:
            socket.create_connection(server.getsockname()[:2], timeout=_REPLY_S).close()
            return address
    raise TasksError(
        "the tasks of this host cannot reach each other: neither 127.0.0.1 nor ::1 nor an address of its own answers; "
        "have its loopback interface brought up (ip link set lo up), or start the script with `hocket run`"
    )


def reachable(host: str) -> str:
    """Return a name or address by which a Slurm node is reached: its name need not be one that the network knows."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            asked = ["scontrol", "show", "node", host]
            said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False).stdout
            if found := re.search(r"NodeAddr=(\S+)", said):
                return found[1]
        raise TasksError(
            f"the host of rank 0, {host!r}, does not resolve here; set MASTER_ADDR to an address of it for all ranks"
        ) from None
    return host


def _line(asked: socket.socket, most: int) -> bytes:
    """Return a line, or the first `most` bytes of it. Raises OSError: it takes too long, however it comes."""
    found, end_s = b"", time.monotonic() + _REPLY_S
    while len(found) < most and not found.endswith(b"\n"):
        asked.settimeout(max(0.001, end_s - time.monotonic()))
        piece = asked.recv(most - len(found))
        if not piece:
            break
        found += piece
    return found


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _agree(tasks: LaunchedTask) -> int:
    """Return a port that is free on rank 0's host, and which all tasks of the job return.

    Rank 0 answers at one of a few ports that follow from the job's name, and answers who says that name. Where tasks
    hold a secret, name and answer are proved by it.
    """
    secret = _secret()
    name = _proof(secret, tasks.job)
    begin = int(name[:12], 16)
    ports = [_FIRST_PORT + (begin + index * 997) % _PORTS for index in range(_CANDIDATES)]
    if tasks.rank:
        return _ask(tasks, name, secret, ports)
    return _answer(tasks, name, secret, ports)


def _ask(tasks: LaunchedTask, name: bytes, secret: bytes, ports: list[int]) -> int:
    """Return the port that rank 0 tells, which is asked at each of some ports until it answers."""
    assert tasks.host is not None
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        for port in ports:
            with contextlib.suppress(OSError, ValueError):
                nonce = secrets.token_hex(16)
                with socket.create_connection((tasks.host, port), timeout=_REPLY_S) as asked:
                    asked.sendall(name + nonce.encode())
                    word, answer, proof = _line(asked, _MOST_ANSWER).split()
                if word == b"hocket" and hmac.compare_digest(proof, _proof(secret, nonce + answer.decode())):
                    return int(answer)
        time.sleep(0.1)
    raise TasksError(
        f"rank {tasks.rank} of {tasks.size} did not find rank 0 at {tasks.host} in {_PATIENCE_S:.0f} s; if that is "
        "not its address, set MASTER_ADDR for all ranks; if a firewall is between them, MASTER_PORT, too; if "
        "HOCKET_SECRET_FILE is set, all need the same secret"
    )


def _answer(tasks: LaunchedTask, name: bytes, secret: bytes, ports: list[int]) -> int:
    """Return a free port, of which a thread tells the other tasks at the first of some ports that is free, too."""
    deadline_s = time.monotonic() + _PATIENCE_S
    both = socket.has_dualstack_ipv6() and tasks.host != LOCAL
    family, bound = (socket.AF_INET6 if both else socket.AF_INET), LOCAL if tasks.host == LOCAL else ""
    for port in ports:
        with contextlib.suppress(OSError):
            server = socket.create_server((bound, port), family=family, backlog=1024, dualstack_ipv6=both)
            break
    else:
        raise TasksError(f"none of the ports {ports} of this host is free; set MASTER_PORT for all ranks")
    free = _free_port()
    heard: list[str] = []
    askers: deque[socket.socket] = deque()

    def reply(asked: socket.socket) -> None:
        with asked, contextlib.suppress(OSError):
            said = _line(asked, len(name) + 32)
            if hmac.compare_digest(said[: len(name)], name):
                nonce = said[len(name) :].decode("ascii", "replace")
                asked.sendall(b"hocket %d %s\n" % (free, _proof(secret, f"{nonce}{free}")))
                heard.append(nonce)
        with contextlib.suppress(ValueError):
            askers.remove(asked)

    def serve() -> None:
        with server:
            server.settimeout(0.2)
            while len(heard) < tasks.size - 1 and time.monotonic() < deadline_s:
                with contextlib.suppress(OSError):
                    asked, _ = server.accept()
                    askers.append(asked)
                    if len(askers) > _ASKERS:
                        with contextlib.suppress(OSError):
                            askers.popleft().shutdown(socket.SHUT_RDWR)
                    threading.Thread(target=reply, args=(asked,), daemon=True).start()

    threading.Thread(target=serve, name="hocket-agree", daemon=True).start()
    return free


def _secret() -> bytes:
    """Return the job's secret as HOCKET_SECRET or HOCKET_SECRET_FILE say; without either, nothing.

    Whether the file is private is looked at where ranks meet (`hocket.comm.rendezvous`).
    """
    if text := os.environ.get("HOCKET_SECRET"):
        return text.encode()
    path = os.environ.get("HOCKET_SECRET_FILE")
    if not path:
        return b""
    try:
        with open(path, "rb") as file:
            return file.read(1 << 16).strip()
    except OSError as error:
        raise TasksError(f"HOCKET_SECRET_FILE={path} cannot be read: {error.strerror}") from None


def _proof(secret: bytes, text: str) -> bytes:
    return hmac.new(secret, b"hocket tasks " + text.encode(), hashlib.sha256).hexdigest().encode()


def _agree_by_mpi(tasks: LaunchedTask) -> tuple[str, str]:
    """Return rank 0's address and a free port of it, told to all by MPI itself: its variables do not name the host."""
    world, library = _world_of_mpi()
    if world is None or world.Get_size() != tasks.size:
        other = f"; here it loads {library}, which knows nothing of these ranks" if library else ""
        raise TasksError(
            f"{tasks.launcher} has started {tasks.size} ranks on several hosts, and its variables do not tell where "
            "rank 0 is. Name that host: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 python train.py (MPICH: mpirun "
            f"-genv MASTER_ADDR HOST -genv MASTER_PORT 29500); or install mpi4py for this MPI, which tells it{other}"
        )
    name = socket.gethostname()
    found: tuple[str, str] = world.bcast((_own_address(name), str(_free_port())), root=0)
    return found


def _world_of_mpi() -> tuple[Any, str]:
    """Return the communicator of all ranks, if mpi4py has one, and the name of the MPI that mpi4py loads.

    Open MPI is not initialized in ranks that it has not started: it would say "Sorry!" of what it misses, and leave
    files in /dev/shm.
    """
    try:
        import mpi4py
    except ImportError:
        return None, ""
    before = {name: getattr(mpi4py.rc, name) for name in ("initialize", "finalize")}
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True  # what is initialized below ends with the process
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # mpi4py 4 raises the latter where there is no MPI to load
        return None, ""
    finally:
        for name, value in before.items():
            setattr(mpi4py.rc, name, value)
    library = MPI.Get_library_version()
    library = library[: library.find(",")] if "," in library else library.partition("\n")[0]
    if not MPI.Is_initialized():
        if "Open MPI" in library and "OMPI_COMM_WORLD_RANK" not in os.environ:
            return None, library
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI.COMM_WORLD, library


def _own_address(name: str) -> str:
    """Return this host's address towards others: that of its name, or of the interface of its default route."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(name)
        if not address.startswith("127."):
            return address
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; an address for documentation, RFC 5737
        return str(probe.getsockname()[0])
    return name
