"""Which cores a worker computes on. This module does not import torch: cores must be taken before torch starts."""

import os
from dataclasses import dataclass, replace

from hocket._limits import usable_cores


@dataclass(frozen=True, slots=True)
class Cores:
    """A worker's cores."""

    mine: tuple[int, ...]  # the cores that this worker may run on
    threads: int  # threads that it computes with
    exclusive: bool  # whether no other worker of the run has any of them

    def __str__(self) -> str:
        if self.exclusive:
            return f"{_count(self.threads, 'core')} of its own"
        return f"{_count(self.threads, 'thread')} on {_count(len(self.mine), 'core')} shared by all workers"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def share(available: tuple[int, ...], local_rank: int, local_world: int) -> Cores:
    """Worker ``local_rank``'s part of a host's cores: equal parts, no core in two; left-over cores stay unused.

    With more workers than cores nothing can be held apart, and every worker computes with one thread wherever there
    is space.
    """
    part = len(available) // local_world
    if part == 0:
        return Cores(available, threads=1, exclusive=False)
    return Cores(available[local_rank * part : (local_rank + 1) * part], threads=part, exclusive=True)


def take(local_rank: int, local_world: int) -> Cores:
    """Bind this process to its `share`; threads that are started later inherit that."""
    cores = share(tuple(sorted(os.sched_getaffinity(0))), local_rank, local_world)
    cores = replace(cores, threads=min(cores.threads, max(1, usable_cores() // local_world)))
    os.sched_setaffinity(0, cores.mine)
    os.environ["OMP_NUM_THREADS"] = str(cores.threads)
    return cores
