"""`hocket run` inside jobs that other launchers have made: one start on every node of a Slurm allocation."""

import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from types import FrameType

from hocket._meeting_place import meeting_place
from hocket._sweep import JOB_VARIABLE
from hocket._tasks import described, tasks_per_node

from ._failure import LaunchError
from ._job import SAVED_MARK, blocked
from ._listener import Notices

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_ASK_S = 20.0  # for Slurm's controller to answer
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_UNDER_LAUNCHER = {JOB_VARIABLE, "TORCHELASTIC_RUN_ID"}  # in a rank of hocket run, of torchrun


def become_node(flags: Namespace) -> None:
    """Where srun or mpirun has started a `hocket run` on each host, make them one job: as with --nnodes and the rest.

    Raises:
        ValueError: There are several on this host, or they do not find each other.
    """
    task = None if _UNDER_LAUNCHER & os.environ.keys() else described()
    if task is None or task.size == 1:
        return
    # enroot's hook sets RANK and WORLD_SIZE from Slurm's; others say that this start is one of its own.
    if "RANK" in os.environ and (os.environ["RANK"], os.environ.get("WORLD_SIZE")) != (str(task.rank), str(task.size)):
        return
    if task.local_size != 1:
        raise ValueError(
            f"{task.launcher} has started {task.local_size} `hocket run` on this host, and each would start ranks. "
            f"Start one on each host (srun --ntasks-per-node=1, mpirun --map-by ppr:1:node), or the script itself: "
            f"{task.launcher} python train.py"
        )
    address, port = meeting_place(task)
    flags.nnodes, flags.node_rank, flags.master_addr, flags.master_port = str(task.size), task.rank, address, int(port)


def ranks_of_node(environment: Mapping[str, str]) -> int | None:
    """Return the tasks of each node that a Slurm job asked for; None outside of Slurm. ValueError: nodes differ."""
    counts = set(tasks_per_node(environment.get("SLURM_TASKS_PER_NODE", "")))
    if "SLURM_NTASKS" not in environment:
        return None
    if len(counts) > 1:
        raise ValueError(
            f"this Slurm job has {environment['SLURM_NTASKS']} tasks, {environment['SLURM_TASKS_PER_NODE']} on its "
            "nodes, and `hocket run` starts as many on each: give -n, ask with --ntasks-per-node, or write: "
            "srun python train.py"
        )
    return counts.pop() if counts else None


def step_command(words: Sequence[str], nproc: int, environment: Mapping[str, str]) -> list[str] | None:
    """Return the srun that starts `hocket run` with these words on every node of the allocation, `nproc` ranks on each.

    None where there is no allocation of several nodes, or where this is one of its steps already.

    Raises:
        ValueError: The job has several components, of which an allocation's variables describe the first.
    """
    if int(environment.get("SLURM_HET_SIZE", "1")) > 1 and not {"SLURM_STEP_ID", "RANK"} & environment.keys():
        last = int(environment["SLURM_HET_SIZE"]) - 1
        raise ValueError(
            f"this Slurm job has {last + 1} components, and `hocket run` would start on the nodes of the first alone; "
            f"have srun start the script itself on all: srun --het-group=0-{last} python train.py"
        )
    nodes = int(environment.get("SLURM_JOB_NUM_NODES", "1"))
    in_step = "SLURM_STEP_ID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    if "SLURM_JOB_ID" not in environment or nodes == 1 or in_step or "RANK" in environment:
        return None
    # srun would give its one task on a node one core.
    cores = min(tasks_per_node(environment.get("SLURM_JOB_CPUS_PER_NODE", "1")))
    srun = [
        "srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cores}",
        "--kill-on-bad-exit=1",
    ]  # fmt: skip
    return [*srun, sys.executable, "-m", "hocket", "run", f"-n={nproc}", *words]


def run_step(command: Sequence[str]) -> int:
    """Run the srun of a `step_command` to its end; return its exit status, as a shell gives it.

    Where srun itself gets SIGTERM or SIGHUP (from timeout(1), a script's trap, a terminal that closes) it has all tasks
    killed at once. So these go to the launchers on the nodes, as they come where the job is cancelled: the ranks may
    save. Others it passes on by itself.

    Raises:
        LaunchError: srun cannot be started.
    """
    own_group = not _in_foreground()  # else the terminal's keys are for srun, too, and it may read what is typed
    before = {number: signal.getsignal(number) for number in (*_ENDING, signal.SIGINT, signal.SIGUSR1)}
    heard = [number for number, handler in before.items() if number == signal.SIGUSR1 or handler != signal.SIG_IGN]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    notices = Notices()

    def begin() -> None:
        if own_group:  # timeout(1) signals all of its group
            os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def hear(number: int, frame: FrameType | None) -> None:
        del frame
        if number in _ENDING:
            if not notices.are_new(number):
                return
            if (trouble := _signal_step(srun.pid, number)) is None:
                return
            print(f"hocket: srun is to end the step at once: {trouble}", file=sys.stderr, flush=True)
        if own_group or number != signal.SIGINT:
            srun.send_signal(number)

    try:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # and so it stays in srun, until that listens
        try:
            srun = subprocess.Popen(command, preexec_fn=begin)
        except OSError as error:
            raise LaunchError(
                f"this Slurm job has several nodes, and {command[0]}, which starts on all, cannot be run here: "
                f"{error.strerror}; add it to PATH"
            ) from None
        for number in heard:
            signal.signal(number, hear)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = srun.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR1 else handler)  # which may still come
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return 128 - status if status < 0 else status


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _signal_step(pid: int, number: int) -> str | None:
    """Have Slurm signal the tasks of the step whose srun this process is; return what prevents that, if it does."""

    def ask(*words: str) -> str:
        with blocked(_ENDING):  # who signals all of our group must not end it
            return subprocess.run(words, capture_output=True, text=True, check=True, timeout=_ASK_S).stdout

    owner = f"SrunHost:Pid={socket.gethostname().partition('.')[0]}:{pid}"
    try:
        steps = ask("scontrol", "--oneliner", "show", "step", os.environ["SLURM_JOB_ID"])
        for words in map(str.split, steps.splitlines()):
            if owner in words:
                name = signal.Signals(number).name.removeprefix("SIG")
                ask("scancel", f"--signal={name}", words[0].removeprefix("StepId="))
                return None
    except subprocess.CalledProcessError as error:
        return f"{error.cmd[0]}: {error.stderr.strip() or error.returncode}"
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "no such step has begun"


def batch_script(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a script for sbatch that does the same in an allocation like this one.

    90 s before the time limit its ranks get SIGUSR1; a job whose ranks have saved then (`Trainer.resume`) is queued
    again, and so is one that is preempted.
    """
    cores = next(word for word in command if word.startswith("--cpus-per-task="))  # as srun's, which fails with fewer
    wanted = {
        "partition": "SLURM_JOB_PARTITION", "gpus-per-node": "SLURM_GPUS_PER_NODE", "mem": "SLURM_MEM_PER_NODE",
        "mem-per-cpu": "SLURM_MEM_PER_CPU",
    }  # fmt: skip
    head = [f"--nodes={environment['SLURM_JOB_NUM_NODES']}", "--ntasks-per-node=1", cores]
    head += [f"--{key}={environment[name]}" for key, name in wanted.items() if environment.get(name)]
    head += ["--requeue", "--signal=USR1@90", "--open-mode=append"]
    return "\n".join(
        [
            "#!/bin/sh",
            *(f"#SBATCH {flag}" for flag in head),
            f'export {SAVED_MARK}="${{TMPDIR:-/tmp}}/hocket-saved-$SLURM_JOB_ID"',
            shlex.join(command),
            "status=$?",
            f'if rm "${SAVED_MARK}" 2>/dev/null; then scontrol requeue "$SLURM_JOB_ID"; fi  # the ranks have saved',
            "exit $status",
        ]
    )
