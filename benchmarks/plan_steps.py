"""Step times of plans against torch's own forms on Gloo, all in one run and in turn: DDP, FSDP2, pipelining.

    python -m benchmarks.plan_steps [--ranks 2] [--steps 20] [--width 512] [--layers 8] [--batch 64]

Every form trains the same stack of layers on the same batches. Steps of all forms take turns, so that whatever else the
machine does meets all of them; what counts is the ratio of medians, with the quartiles of the ratio of neighbours.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks

Step = Callable[[torch.Tensor, torch.Tensor], None]
MICRO_BATCHES = 4


def stack(width: int, layers: int) -> nn.Sequential:
    """The model: layers of equal size, each a linear map and a nonlinearity."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer."""
    return torch.optim.Adam(model.parameters(), lr=1e-4)


def by_plan(model: nn.Module, plan: Plan, sample: torch.Tensor) -> Step:
    """A step by Hocket; a rank takes its part of the batch by itself."""
    trainer = hocket.Trainer(model, nn.functional.mse_loss, adam(model), plan, sample=sample)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        trainer.step((x, y)).item()

    return step


def by_loop(model: nn.Module, optimizer: Any, rank: int, size: int) -> Step:
    """A step as torch's examples have it, on this rank's part of the batch."""

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        mine, target = x.chunk(size)[rank], y.chunk(size)[rank]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(mine), target)
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def by_stages(model: nn.Sequential, group: Any, rank: int, size: int) -> Step:
    """A step of torch's pipelining, stages of as many layers each."""
    each = len(model) // size
    part = nn.Sequential(*list(model)[rank * each : (rank + 1) * each])
    optimizer = adam(part)
    stage = PipelineStage(part, rank, size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        elif rank == size - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        optimizer.step()

    return step


def forms(width: int, layers: int, batch: int) -> dict[str, Step]:
    """All forms: those of torch on a group of Gloo's, Hocket's on its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gloo = dist.new_group(backend="gloo")
    mesh = DeviceMesh.from_group(gloo, "cpu")
    sharded = stack(width, layers)
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    replicated = [DistributedDataParallel(stack(width, layers), process_group=gloo) for _ in range(2)]
    zero = ZeroRedundancyOptimizer(replicated[1].parameters(), torch.optim.Adam, process_group=gloo, lr=1e-4)
    sample = torch.ones(batch // MICRO_BATCHES, width)
    points = tuple(str(i * layers // size) for i in range(1, size))
    pipeline = Plan(pipeline_parallel_degree=size, micro_batches=MICRO_BATCHES, split=points)
    return {
        "torch DDP": by_loop(replicated[0], adam(replicated[0]), rank, size),
        "hocket data": by_plan(stack(width, layers), Plan(), sample),
        "torch DDP + ZeroRedundancyOptimizer": by_loop(replicated[1], zero, rank, size),
        "hocket shard=optimizer": by_plan(stack(width, layers), Plan(shard="optimizer"), sample),
        "hocket shard=gradients": by_plan(stack(width, layers), Plan(shard="gradients"), sample),
        "torch FSDP2": by_loop(sharded, adam(sharded), rank, size),
        "hocket shard=parameters": by_plan(stack(width, layers), Plan(shard="parameters"), sample),
        "torch pipelining": by_stages(stack(width, layers), gloo, rank, size),
        "hocket pipeline": by_plan(stack(width, layers), pipeline, sample),
    }


PEERS = {
    "hocket data": "torch DDP",
    "hocket shard=optimizer": "torch DDP + ZeroRedundancyOptimizer",
    "hocket shard=gradients": "torch DDP + ZeroRedundancyOptimizer",
    "hocket shard=parameters": "torch FSDP2",
    "hocket pipeline": "torch pipelining",
}


def timed(steps: int, width: int, layers: int, batch: int) -> dict[str, list[float]]:
    """Seconds of each step of each form, from when all ranks are ready until the last has finished."""
    warnings.filterwarnings("ignore")
    found = forms(width, layers, batch)
    torch.manual_seed(1)
    x, y = torch.randn(batch, width), torch.randn(batch, width)
    times: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(steps + 3):
        for name, step in found.items():
            dist.barrier()
            begin_s = time.perf_counter()
            step(x, y)
            dist.barrier()
            if turn >= 3:
                times[name].append(time.perf_counter() - begin_s)
    return times


def report(times: dict[str, list[float]]) -> str:
    """A Markdown table of each form with the peer that it is measured against."""
    lines = ["| plan | ms | peer | ms | time over the peer's | quartiles |", "|---|---|---|---|---|---|"]
    for name, peer in PEERS.items():
        ours, theirs = times[name], times[peer]
        low, _, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
        median, other = statistics.median(ours), statistics.median(theirs)
        cells = [name, f"{1e3 * median:.1f}", peer, f"{1e3 * other:.1f}", f"{median / other:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {low:.2f} - {high:.2f} |")
    return "\n".join(lines)


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    a = parser.parse_args()
    times = run_ranks(timed, a.ranks, a.steps, a.width, a.layers, a.batch, timeout_s=1200, group_timeout_s=300)[0]
    print(report(times))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
