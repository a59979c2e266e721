"""What a rank of a measurement needs: its place, the groups, and a common start."""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hocket._limits import usable_cores
from hocket.comm.torch_adapter import FileStore

_AHEAD_S = 3e-4
_AHEAD_SHARED_S = 2e-3
_LATE_S = 1e-5

Sample = tuple[float, float]
"""Seconds that an operation took on this rank, and how many seconds late this rank began it."""


def p90(times: list[float]) -> float:
    """Return the least of sorted times that nine tenths of them do not exceed, which is never below their median."""
    return times[math.ceil(0.9 * len(times)) - 1]


class Rank:
    """One rank: reads the spec named on the command line and joins the world."""

    def __init__(self) -> None:
        self.spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())  # description of the work
        self.n: int = self.spec["n"]  # number of ranks
        self.mpi: Any = None  # mpi4py's module if the spec asks for MPI, else None
        if "mpi" in self.spec["systems"]:
            from mpi4py import MPI

            self.mpi = MPI
            self.rank = MPI.COMM_WORLD.Get_rank()  # number of this rank
        else:
            self.rank = int(os.environ["RANK"])
        self._share_cores = self.n > usable_cores()  # asked once: it reads files, which leaves caches cold
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        dist.init_process_group(
            "hocket", store=FileStore(self.spec["store"], self.n), rank=self.rank, world_size=self.n
        )
        self.gloo = dist.new_group(backend="gloo")  # a Gloo group of all ranks

    def measure(self, operation: Callable[[], Any]) -> Sample:
        """Do `operation` at the same instant on all ranks."""
        late_s = self._align()
        begin_s = time.perf_counter()
        operation()
        return time.perf_counter() - begin_s, late_s

    def _align(self) -> float:
        """Agree with all ranks on an instant a little ahead and wait for it; return how late this rank is, in s.

        Ranks spin if each has a core. If they share cores they sleep, since one that spins keeps another from being
        there in time.
        """
        shared = self._share_cores
        start = torch.tensor([time.perf_counter() + (_AHEAD_SHARED_S if shared else _AHEAD_S)], dtype=torch.float64)
        dist.all_reduce(start, dist.ReduceOp.MAX)
        start_s = start.item()
        if shared:
            time.sleep(max(0.0, start_s - time.perf_counter()))
            return 0.0  # being woken late is part of sharing cores
        while (now_s := time.perf_counter()) < start_s:
            pass
        return now_s - start_s

    def slowest(self, samples: list[Sample]) -> list[float]:
        """Sample by sample, the longest of all ranks; without those at which a rank was not there in time.

        Where a rank came late, the others' times are those of waiting for it, whatever the system. A third of the
        samples stays in any case, those at which ranks were least late.
        """
        both = torch.tensor(samples, dtype=torch.float64)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        limit_s = max(_LATE_S, sorted(both[:, 1].tolist())[len(samples) // 3])
        return [seconds for seconds, late_s in both.tolist() if late_s <= limit_s]

    def say(self, text: str) -> None:
        """Tell who waits for the measurement where it is."""
        if self.rank == 0:
            with Path(self.spec["result"]).with_name("at").open("a") as file:
                file.write(f"{text}\n")

    def report(self, result: dict[str, Any]) -> None:
        if self.rank == 0:
            Path(self.spec["result"]).write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
