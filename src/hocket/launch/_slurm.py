"""`hocket run` inside jobs that other launchers have made: one start on every node of a Slurm allocation."""

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence

from hocket._sweep import JOB_VARIABLE
from hocket._tasks import described, meeting_place, tasks_per_node

from ._job import SAVED_MARK

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
