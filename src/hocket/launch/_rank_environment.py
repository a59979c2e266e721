"""Variables that every rank gets besides torchrun's, unless the user has chosen them: of threads and memory."""

import os

from hocket._limits import usable_cores

from ._arguments import LaunchArguments


def threads_of_rank(ranks: int) -> int | None:
    """Return OMP_NUM_THREADS for each of a host's ranks: its share of the cores; None if it is set or all are its."""
    cores = usable_cores()  # torch knows those that it may run on, and of no quota
    if "OMP_NUM_THREADS" in os.environ or (ranks == 1 and cores == len(os.sched_getaffinity(0))):
        return None
    return max(1, cores // ranks)


def rank_threads(arguments: LaunchArguments) -> int | None:
    """Return OMP_NUM_THREADS for each rank of a job; None where the user has chosen, or a rank has all cores."""
    return None if "OMP_NUM_THREADS" in arguments.environment else threads_of_rank(arguments.nproc)


def defaults() -> dict[str, str]:
    """Return variables that every rank gets unless the user has chosen them.

    Sets of strings have one order in all ranks. Memory comes in huge pages (glibc 2.35, `glibc.malloc.hugetlb`): what a
    step frees goes back to the system and is taken anew in the next, and the kernel clears every page.
    """
    usual = {"PYTHONHASHSEED": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    return {name: value for name, value in usual.items() if name not in os.environ}
