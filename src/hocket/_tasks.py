"""Which task of a job this process is, by the variables of its launcher.

`srun python train.py` and `mpirun python train.py` start a process for each rank, and tell it its number; torch reads
only RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; `_meeting_place.adopt` sets these. Variables that say "many tasks"
are never passed over: N processes that each train alone look like a training and are none.

Only the standard library is imported here.
"""

import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ._sweep import start_ticks, stat_of, variable_of

LOCAL = "127.0.0.1"


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
        return LaunchedTask("mpirun", rank, size, local_rank, local_size, job, LOCAL if local_size == size else None)
    if "PMI_RANK" in env and "MPI_LOCALRANKID" in env:  # Hydra: MPICH, Intel MPI, MVAPICH
        names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        rank, size, local_rank, local_size = _numbers(env, *names)
        host = LOCAL if local_size == size else None
        return LaunchedTask("mpirun", rank, size, local_rank, local_size, _ancestor("PMI_RANK"), host)
    if "SLURM_STEP_ID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _of_srun(env)
    if "SKYPILOT_NODE_RANK" in env:  # one task a node
        rank, size = _numbers(env, "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES")
        first, *_ = env.get("SKYPILOT_NODE_IPS", LOCAL).split()
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
    return LaunchedTask("srun", rank, size, local_rank, local_size, job, LOCAL if local_size == size else hosts[0])


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
        say_idle_components(env)
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


def say_idle_components(env: Mapping[str, str]) -> None:
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
