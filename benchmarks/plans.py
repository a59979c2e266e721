"""The planner against measuring every plan: six models, on 2 and 4 local ranks and on 8 emulated hosts at 100 Mbit/s.

    python benchmarks/plans.py --ranks 2,4                        local ranks
    python benchmarks/plans.py --fabric star:hosts=8,bandwidth=100Mbit/s --ranks 8
    python benchmarks/plans.py --ranks 2 --models mlp --steps 4   a look

For every model and world: all ranks capture the model at once, so that they slow each other as in training; all-reduces
of two sizes give the network's latency and bandwidth; then every admissible plan that the Trainer can carry out is
predicted, run, and measured: the slowest rank's median step. What counts is how far the plan that is predicted to be
the fastest is behind the one that was measured to be, and the error of the predictions. On a machine where nothing else
runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hocket
from hocket.planner import Constants, Network, Plan, PlanError, admissible_plans, predict
from hocket.workload import Workload, capture

# Measured devices and links need no shares; posting a collective is in the measured latency.
CONSTANTS = Constants(
    matmul_share=1.0, memory_share=1.0, kernel_s=0.0, inside_share=1.0, network_share=1.0, collective_s=0.0
)
SIZES = (1 << 12, 1 << 24)
BATCH = 32


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.feed_forward(self.norms[1](x))


def _convolutions(depth: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def models() -> dict[str, tuple[Any, tuple[int, ...], int]]:
    """By name: what makes the model, the shape of a sample, and the size of the output."""
    return {
        "mlp": (lambda: nn.Sequential(*_mlp([512, 1024, 1024, 1024, 10])), (512,), 10),
        "wide": (lambda: nn.Sequential(*_mlp([256, 4096, 256, 10])), (256,), 10),
        "deep": (lambda: nn.Sequential(*_mlp([256] * 16 + [10])), (256,), 10),
        "convolutions": (lambda: _convolutions(6, 32), (3, 32, 32), 10),
        "wide convolutions": (lambda: _convolutions(3, 96), (3, 16, 16), 10),
        "transformer": (
            lambda: nn.Sequential(*(Block(128) for _ in range(4)), nn.Flatten(), nn.Linear(128 * 32, 10)),
            (32, 128),
            10,
        ),
    }


def _mlp(widths: list[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def batch_of(shape: tuple[int, ...], classes: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, *shape, generator=generator), torch.randint(classes, (count,), generator=generator)


# --- on the ranks -----------------------------------------------------------------------------------------------------


def captured(name: str, world: int) -> Workload:
    """The model's workload, with every rank's batch, while all capture; times are the mean over ranks."""
    make, shape, classes = models()[name]
    torch.manual_seed(0)
    sample = batch_of(shape, classes, BATCH // world)
    dist.barrier()
    found = capture(make(), sample, loss=lambda model, given: loss_fn(model(given[0]), given[1]), repeats=7, name=name)
    seconds = torch.tensor([found.forward_s, found.backward_s])
    mine = seconds.clone()
    dist.all_reduce(seconds)
    scale = (seconds / world / mine).tolist()
    layers = tuple(
        dataclasses.replace(one, forward_s=one.forward_s * scale[0], backward_s=one.backward_s * scale[1])
        for one in found.layers
    )
    return dataclasses.replace(found, layers=layers)


def network(world: int) -> tuple[Network, Constants]:
    """What all-reduces of two sizes and an all-gather say: T = 2 (n - 1) alpha + 2 (n - 1)/n S beta, as of a ring."""
    small, large = (timed(nbytes, dist.all_reduce) for nbytes in SIZES)
    slope = (large - small) / (SIZES[1] - SIZES[0])
    rate = 2 * (world - 1) / world / slope
    latency = max(1e-6, (small - SIZES[0] * slope) / (2 * (world - 1)))

    def gather(data: Tensor) -> None:
        part = data[: len(data) // world].clone()
        dist.all_gather_into_tensor(data[: len(part) * world], part)

    wire = (world - 1) * latency + (world - 1) / world * SIZES[1] / rate
    share = max(0.01, min(1.0, wire / timed(SIZES[1], gather)))
    # Every rank is a host of its own here: one level is all that these sizes can tell.
    made = Network("measured", world, 1, rate, latency, rate, rate, latency, 0.0, 0.0, 0, 0.0)
    return made, dataclasses.replace(CONSTANTS, gather_share=share)


def timed(nbytes: int, work: Callable[[Tensor], Any]) -> float:
    """The median of some rounds, the same on every rank."""
    data, each = torch.zeros(nbytes // 4), []
    for _ in range(12):
        dist.barrier()
        begin = time.perf_counter()
        work(data)
        each.append(time.perf_counter() - begin)
    found = torch.tensor(statistics.median(each[2:]))
    dist.broadcast(found, 0)
    return float(found)


def measured(name: str, plan: Plan, steps: int) -> float:
    """The slowest rank's median step."""
    make, shape, classes = models()[name]
    torch.manual_seed(0)
    model = make()
    batch = batch_of(shape, classes, BATCH)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = hocket.Trainer(model, loss_fn, optimizer, plan=plan, sample=(batch[0],))
    each = []
    for _ in range(steps + 2):
        dist.barrier()
        begin = time.perf_counter()
        trainer.step(batch)
        each.append(time.perf_counter() - begin)
    slowest = torch.tensor(each[2:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.median())


def rank_main(name: str, steps: int, out: Path, again: bool) -> None:
    """Everything of one model in one world; rank 0 writes it down."""
    dist.init_process_group("hocket")
    rank, world = dist.get_rank(), dist.get_world_size()
    given: list[Any] = [None]
    workload = captured(name, world)
    where, constants = network(world)
    if rank == 0:
        fixed = {} if again else {"recompute": False}
        plans = admissible_plans(workload, where, workers=world, batch=BATCH, fixed=fixed)
        given = [[plan.to_json() for plan in plans]]
    dist.broadcast_object_list(given)
    rows = []
    for document in given[0]:
        plan = Plan.from_json(document)
        try:
            seconds = measured(name, plan, steps)
        except (PlanError, NotImplementedError, ValueError) as error:  # the same on every rank
            rows.append({"plan": document, "refused": str(error)})
            continue
        found = predict(plan, workload, where, workers=world, batch=BATCH, constants=constants)
        parts = dict(found.parts.rows())
        rows.append({"plan": document, "measured_s": seconds, "predicted_s": found.step_s, "parts": parts})
    if rank == 0:
        links = {"rate_Bps": where.rank_Bps, "latency_s": where.between_s}
        out.write_text(json.dumps({"model": name, "world": world, "network": links, "rows": rows}))
    dist.destroy_process_group()


# --- on the caller's side ---------------------------------------------------------------------------------------------


def judged(document: dict[str, Any]) -> dict[str, Any]:
    """How good the pick is, and the predictions."""
    rows = [row for row in document["rows"] if "measured_s" in row]
    pick = min(rows, key=lambda row: row["predicted_s"])
    best = min(rows, key=lambda row: row["measured_s"])
    errors = [row["predicted_s"] / row["measured_s"] - 1 for row in rows]
    return {
        "model": document["model"],
        "world": document["world"],
        "plans": len(rows),
        "refused": len(document["rows"]) - len(rows),
        "pick": Plan.from_json(pick["plan"]).resolve(document["world"]).describe(),
        "behind": pick["measured_s"] / best["measured_s"] - 1,
        "best": Plan.from_json(best["plan"]).resolve(document["world"]).describe(),
        "median": statistics.median(map(abs, errors)),
        "worst": max(errors, key=abs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--models", default=",".join(models()))
    parser.add_argument("--fabric", default="")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--recompute", action="store_true", help="plans that compute again, too")
    parser.add_argument("--out", type=Path, help="a folder for what was measured, as JSON")
    parser.add_argument("--rank", nargs=2, metavar=("MODEL", "FILE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(given.rank[0], given.steps, Path(given.rank[1]), given.recompute)
        return
    print(
        "| model | ranks | plans | refused | planner's pick | behind the best | best measured | median error | worst |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    folder = given.out or Path(tempfile.mkdtemp(prefix="plans"))
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for world in map(int, given.ranks.split(",")):
        for name in given.models.split(","):
            file = folder / f"{name.replace(' ', '-')}-{world}.json"
            words = [sys.executable, "-m", "hocket", "run", "-n", str(world), "--timeout", "1800"]
            words += ["--fabric", given.fabric] if given.fabric else []
            words += [
                __file__,
                *(["--recompute"] if given.recompute else []),
                "--steps",
                str(given.steps),
                "--rank",
                name,
                str(file),
            ]
            subprocess.run(words, check=True, stdout=sys.stderr)
            one = judged(json.loads(file.read_text()))
            found.append(one)
            print(
                f"| {name} | {world} | {one['plans']} | {one['refused']} | {one['pick']} | {one['behind']:.1%} | "
                f"{one['best']} | {one['median']:.1%} | {one['worst']:+.1%} |",
                flush=True,
            )
    near = sum(one["behind"] <= 0.10 for one in found)
    print(f"\nThe pick is within 10% of the best in {near} of {len(found)} cases.")


if __name__ == "__main__":
    main()
