"""What a rank of a measurement needs: its place, the groups, and a common start."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hocket.comm.torch_adapter import FileStore

_AHEAD_S = 3e-4
_AHEAD_SHARED_S = 2e-3


class Rank:
    """One rank: reads the spec named on the command line and joins the world.

    Attributes:
        spec: what to do.
        rank: this rank's number.
        n: number of ranks.
        mpi: mpi4py's module if the spec asks for MPI, else None.
        gloo: a Gloo group of all ranks.
    """

    def __init__(self) -> None:
        self.spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
        self.n: int = self.spec["n"]
        self.mpi: Any = None
        if "mpi" in self.spec["systems"]:
            from mpi4py import MPI

            self.mpi = MPI
            self.rank = MPI.COMM_WORLD.Get_rank()
        else:
            self.rank = int(os.environ["RANK"])
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        dist.init_process_group(
            "hocket", store=FileStore(self.spec["store"], self.n), rank=self.rank, world_size=self.n
        )
        self.gloo = dist.new_group(backend="gloo")

    def align(self) -> None:
        """Returns at the same instant on all ranks: they agree on one a little ahead and wait for it.

        They spin if each has a core. If ranks share cores they sleep, since one that spins keeps another from being
        there in time.
        """
        shared = self.n > len(os.sched_getaffinity(0))
        start = torch.tensor([time.perf_counter() + (_AHEAD_SHARED_S if shared else _AHEAD_S)], dtype=torch.float64)
        dist.all_reduce(start, dist.ReduceOp.MAX)
        start_s = start.item()
        if shared:
            time.sleep(max(0.0, start_s - time.perf_counter()))
            return
        while time.perf_counter() < start_s:
            pass

    def slowest(self, samples: list[float]) -> list[float]:
        """Sample by sample, the longest of all ranks."""
        times = torch.tensor(samples, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return [float(t) for t in times.tolist()]

    def report(self, result: dict[str, Any]) -> None:
        """Rank 0 writes the result; the world ends."""
        if self.rank == 0:
            Path(self.spec["result"]).write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
