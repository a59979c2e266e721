"""Which task of a job this process is, by the variables of its launcher, and how the tasks of a job find each other.

`srun python train.py` and `mpirun python train.py` start a process for each rank, and tell it its number; torch reads
only RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Here the former become the latter. Variables that say "many tasks"
are never passed over: N processes that each train alone look like a training and are none.

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
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ._sweep import start_ticks, stat_of, variable_of

_CANDIDATES = 8  # ports at which rank 0 may answer, should other jobs have the first of them
_FIRST_PORT, _PORTS = 15_000, 15_000  # below those that the kernel hands out
_PATIENCE_S = 300.0  # as long as torch's own stores wait; the tasks of a large job start over minutes
_REPLY_S = 2.0
_MOST_ANSWER = 256  # bytes of rank 0's answer
_ASKERS = 256  # at once; the next takes the oldest one's place, so that who asks nothing keeps nobody out
_LOCAL = "127.0.0.1"


class TasksError(ValueError):
    """The variables of a launcher describe many tasks, and do not suffice to join them; the message says what to do."""


@dataclass(frozen=True, slots=True)
class LaunchedTask:
    """One of a job's processes, as its launcher's variables describe it."""

    launcher: str  # what started them: "srun", "mpirun", "SkyPilot"
    rank: int  # number of this process
    size: int  # how many there are
    local_rank: int  # number among those of this host
    local_size: int  # how many there are on this host
    job: str  # a text that is the same in all of them, and in no other job
    host: str | None  # name or address of the host of rank 0; None if the variables do not tell


def described(environment: Mapping[str, str] | None = None) -> LaunchedTask | None:
    """Return the tasks that this process is one of; None where no launcher describes any.

    Launchers start each other (mpirun its daemons by srun), so the innermost is looked for first.

    Raises:
        TasksError: There are many, and which one this is, or how many, is not said.
    """
    env = os.environ if environment is None else environment
    if "OMPI_COMM_WORLD_RANK" in env:
        names = (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        )
        rank, size, local_rank, local_size = _numbers(env, *names)
        job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or _ancestor(names[0])
        return LaunchedTask("mpirun", rank, size, local_rank, local_size, job, _LOCAL if local_size == size else None)
    if "PMI_RANK" in env and "MPI_LOCALRANKID" in env:  # Hydra: MPICH, Intel MPI, MVAPICH
        names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        rank, size, local_rank, local_size = _numbers(env, *names)
        host = _LOCAL if local_size == size else None
        return LaunchedTask("mpirun", rank, size, local_rank, local_size, _ancestor("PMI_RANK"), host)
    if "SLURM_STEP_ID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _of_srun(env)
    if "SKYPILOT_NODE_RANK" in env:  # one task a node
        rank, size = _numbers(env, "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES")
        first, *_ = env.get("SKYPILOT_NODE_IPS", _LOCAL).split()
        return LaunchedTask("SkyPilot", rank, size, 0, 1, env.get("SKYPILOT_TASK_ID", "skypilot"), first)
    if "PMI_RANK" in env and int(env.get("PMI_SIZE", "1")) > 1 or "PMIX_RANK" in env and "SLURM_STEP_ID" not in env:
        raise TasksError(
            f"PMI_RANK={env.get('PMI_RANK')}, PMIX_RANK={env.get('PMIX_RANK')}: a launcher that Hocket does not know "
            "has started this process as one of several, and does not say how they lie on hosts; set RANK, WORLD_SIZE, "
            "LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each, or start the script with `hocket run`"
        )
    return None


def _of_srun(env: Mapping[str, str]) -> LaunchedTask:
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
    rank, size, local_rank, node = _numbers(env, *names)
    counts = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    hosts = list(expand_hosts(env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]))
    several = len(components := _components(env)) > 1
    if several and len(counts) == len(hosts):
        # Slurm counts nodes by components, and lists all of them, and their tasks, by their names (seen in 22.05).
        by_name = dict(zip(hosts, counts, strict=True))
        hosts = [host for component in components for host in component if host in by_name]
        counts = [by_name[host] for host in hosts]
    own = env.get("SLURMD_NODENAME")
    fits = rank < size and node < len(counts) and local_rank < counts[node]
    if not fits or several and (size != sum(counts) or own not in (None, hosts[node])):
        raise TasksError(
            f"SLURM_PROCID={rank}, SLURM_LOCALID={local_rank} and SLURM_NODEID={node}{f' ({own})' if own else ''} "
            f"do not fit SLURM_STEP_NUM_TASKS={size} and SLURM_STEP_TASKS_PER_NODE={','.join(map(str, counts))}, as in "
            "a step of several components of a heterogeneous job; start one component (srun --het-group=0), or set "
            "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each task"
        )
    job, local_size = f"slurm-{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}", counts[node]
    return LaunchedTask("srun", rank, size, local_rank, local_size, job, _LOCAL if local_size == size else hosts[0])


def _components(env: Mapping[str, str]) -> list[list[str]]:
    """Return the hosts of each component of a heterogeneous Slurm job; nothing for other jobs."""
    count = env.get("SLURM_HET_SIZE", "0")
    lists = [
        env.get(f"SLURM_JOB_NODELIST_HET_GROUP_{index}")
        or env.get(f"SLURM_JOB_NODELIST_PACK_GROUP_{index}", "")  # where srun itself has made the job
        for index in range(int(count) if count.isdigit() else 0)
    ]
    return [list(expand_hosts(hosts)) for hosts in lists]


def check_given() -> None:
    """See to it that RANK, WORLD_SIZE and MASTER_PORT, as far as they are set, can be what torch takes them for.

    Raises:
        TasksError: They cannot; torch would wait for a store that nobody opens, or say that "" is no number.
    """
    env = os.environ
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if name in env and not (env[name].strip().isdecimal() and env[name].isascii()):
            raise TasksError(f"{name}={env[name]!r}: give a whole number; `hocket run` and torchrun set it themselves")
    if "WORLD_SIZE" in env and not int(env.get("RANK", "0")) < int(env["WORLD_SIZE"]):
        raise TasksError(
            f"RANK={env.get('RANK', '0')} and WORLD_SIZE={env['WORLD_SIZE']}: ranks count from 0 to WORLD_SIZE - 1; "
            "set both anew, or start the script with `hocket run`"
        )
    if not 0 <= int(env.get("MASTER_PORT", "1")) < 1 << 16:
        raise TasksError(f"MASTER_PORT={env['MASTER_PORT']}: give the port where rank 0 listens, below 65536")


def launched() -> bool:
    """Return whether this process is one of several that are to form a group, or has been told to form one.

    Raises:
        TasksError: It is one of several, and cannot know which.
    """
    env = os.environ
    check_given()
    if "RANK" in env and "WORLD_SIZE" in env:
        return env["WORLD_SIZE"] != "1" or "MASTER_ADDR" in env
    tasks = described()
    if tasks is not None and tasks.size > 1:
        return True
    size = env.get("WORLD_SIZE", "1")
    if "RANK" in env and env["RANK"] != "0" or size != "1":
        have, missing = ("RANK", "WORLD_SIZE") if "RANK" in env else ("WORLD_SIZE", "RANK")
        raise TasksError(
            f"{have}={env[have]} is set and {missing} is not, so that each process would train alone; set both "
            "(and MASTER_ADDR, MASTER_PORT), or start the script with `hocket run`, torchrun, srun or mpirun"
        )
    if "SLURM_STEP_ID" in env and "RANK" not in env:
        _say_idle_components(env)
    _say_idle_tasks(env)
    return False


def _say_idle_tasks(env: Mapping[str, str]) -> None:
    """Say that a Slurm job has more tasks than this process, which a batch script starts once if it writes no srun."""
    tasks = env.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in env and tasks.isdigit() and int(tasks) > 1:
        script = sys.argv[0] or "train.py"
        print(
            f"hocket: this Slurm job has {tasks} tasks, and this process trains alone. To train on all of them, write: "
            f"srun python {script}    or: hocket run {script}",
            file=sys.stderr,
            flush=True,
        )


def _say_idle_components(env: Mapping[str, str]) -> None:
    """Say that a heterogeneous Slurm job has components on which this step has no tasks: srun takes the first alone."""
    components = _components(env)
    used = set(expand_hosts(env.get("SLURM_STEP_NODELIST", "")))
    if idle := [index for index, hosts in enumerate(components) if not used & set(hosts)]:
        print(
            f"hocket: this Slurm job has {len(components)} components, and this step has no tasks on "
            f"{', '.join(map(str, idle))} (counted from 0). To train on all of them, give srun "
            f"--het-group=0-{len(components) - 1}",
            file=sys.stderr,
            flush=True,
        )


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
        _say_idle_components(os.environ)
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if tasks.size == 1:
        address, port = address or _LOCAL, port or str(_free_port())
    elif address is None and tasks.host is None:
        address, port = _agree_by_mpi(tasks)
    if address is None and tasks.host == _LOCAL and tasks.size > 1:
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
    for address in dict.fromkeys((_LOCAL, "::1", _own_address(socket.gethostname()))):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.create_server((address, 0), family=family) as server:
            socket.create_connection(server.getsockname()[:2], timeout=_REPLY_S).close()
            return address
    raise TasksError(
        "the tasks of this host cannot reach each other: neither 127.0.0.1 nor ::1 nor an address of its own answers; "
        "have its loopback interface brought up (ip link set lo up), or start the script with `hocket run`"
    )


def expand_hosts(text: str) -> Iterator[str]:
    """Give the hosts of a list as Slurm writes it, in its order: "a[1-2,07],b" is a1, a2, a07, b."""
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        parts = re.split(r"\[([^\]]*)\]", item)
        names = [parts[0]]
        for ranges, rest in zip(parts[1::2], parts[2::2], strict=True):
            numbers = [number for one in ranges.split(",") for number in _range(one)]
            names = [f"{name}{number}{rest}" for name in names for number in numbers]
        yield from names


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node as Slurm writes them: "2(x2),1" is 2, 2, 1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


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


def _range(text: str) -> list[str]:
    first, _, last = text.partition("-")
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]


def _numbers(env: Mapping[str, str], *names: str) -> list[int]:
    missing = [name for name in names if not env.get(name, "").isdigit()]
    if missing:
        raise TasksError(
            f"{names[0]}={env.get(names[0], '')} says that this process is one of several, and "
            f"{missing[0]} is missing; start the script with `hocket run`, or set RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT"
        )
    return [int(env[name]) for name in names]


def _ancestor(variable: str) -> str:
    """Return what names the process that started the tasks of this host: the nearest without the task's variable."""
    pid = os.getpid()
    while pid > 1 and variable_of(pid, variable) is not None:
        pid = int(stat_of(pid)[1])
    return f"{socket.gethostname()}-{pid}-{start_ticks(pid)}"


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
    both = socket.has_dualstack_ipv6() and tasks.host != _LOCAL
    family, bound = (socket.AF_INET6 if both else socket.AF_INET), _LOCAL if tasks.host == _LOCAL else ""
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
