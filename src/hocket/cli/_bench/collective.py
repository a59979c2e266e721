"""Measures one collective at several sizes with several systems in the same processes. Run by `hocket bench`.

Systems take turns in every round. In its turn a system first does operations that do not count, so that it does not
pay for the caches, the sleeping threads and the socket buffers that its predecessor left; then every measured
operation starts on all ranks at once, and its time is that of the slowest rank.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hocket import comm
from hocket.profile import bus_factor
from hocket.units import format_bytes

from .rank import Rank, Sample, p90

_UNMEASURED = 2
_SMALL, _MEDIUM = 128 * 2**10, 4 * 2**20

Operation = Callable[[], Any]


def samples_a_turn(nbytes: int) -> int:
    """More of what is short, since its spread is larger and its cost small."""
    return 20 if nbytes <= _SMALL else 8 if nbytes <= _MEDIUM else 2


def work() -> None:
    """Do everything that one rank does."""
    rank = Rank()
    spec = rank.spec
    kind = spec["collective"]
    rows: list[dict[str, Any]] = []
    floors: list[dict[str, Any]] = []
    for nbytes in spec["sizes"]:
        rank.say(format_bytes(nbytes, 3))
        numel = max(rank.n, nbytes // 4 // rank.n * rank.n)
        turns: dict[tuple[str, bool], Operation] = {}
        for system in spec["systems"]:
            turns[system, False] = _operation(rank, spec["collective"], system, numel, torch.zeros)
            if system == "hocket" and spec["registered"]:
                turns[system, True] = _operation(rank, spec["collective"], system, numel, comm.zeros)
        source, target = torch.zeros(numel), torch.zeros(numel)
        turns["copy", False] = partial(target.copy_, source)
        turns["scale", False] = partial(target.mul_, 1.0)
        samples: dict[tuple[str, bool], list[Sample]] = {turn: [] for turn in turns}
        for _ in range(spec["rounds"]):
            for turn, operation in turns.items():
                for _ in range(_UNMEASURED):
                    operation()
                for _ in range(samples_a_turn(nbytes)):
                    samples[turn].append(rank.measure(operation))
        slowest = {turn: sorted(rank.slowest(own)) for turn, own in samples.items()}
        copied, scaled = (statistics.median(slowest.pop((kernel, False))) for kernel in ("copy", "scale"))
        floors.append({"nbytes": numel * 4, "floor_s": min(copied, scaled), "copy_s": copied, "scale_s": scaled})
        for (system, registered), times in slowest.items():
            median_s = statistics.median(times)
            rows.append(
                {
                    "system": system,
                    "n": rank.n,
                    "nbytes": numel * 4,
                    "registered": registered,
                    "median_s": median_s,
                    "p90_s": p90(times),
                    "algbw_Bps": numel * 4 / median_s,
                    "busbw_Bps": numel * 4 / median_s * bus_factor(kind, rank.n),
                }
            )
    rank.report({"collective": kind, "rows": rows, "floor": floors})


def _operation(rank: Rank, collective: str, system: str, numel: int, zeros: Callable[..., torch.Tensor]) -> Operation:
    """Return the collective on fresh buffers; `numel` counts the full vector as nccl-tests do."""
    whole, part = zeros(numel), zeros(numel // rank.n)
    if system == "mpi":
        return _mpi_operation(rank, collective, whole, part)
    group = rank.gloo if system == "gloo" else dist.group.WORLD
    other = zeros(numel) if collective == "all_to_all" else whole
    operations: dict[str, Operation] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all_gather": lambda: dist.all_gather_single(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    return operations[collective]


def _mpi_operation(rank: Rank, collective: str, whole: torch.Tensor, part: torch.Tensor) -> Operation:
    world, in_place = rank.mpi.COMM_WORLD, rank.mpi.IN_PLACE
    a, b, c = whole.numpy(), part.numpy(), torch.zeros_like(whole).numpy()
    operations: dict[str, Operation] = {
        "all_reduce": lambda: world.Allreduce(in_place, a),
        "broadcast": lambda: world.Bcast(a, 0),
        "all_gather": lambda: world.Allgather(b, a),
        "reduce_scatter": lambda: world.Reduce_scatter_block(a, b),
        "all_to_all": lambda: world.Alltoall(a, c),
    }
    return operations[collective]


if __name__ == "__main__":
    work()
