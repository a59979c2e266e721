"""Pipelines: idle share against the formula, and step time beside plain torch.distributed.pipelining on Gloo.

    python benchmarks/pipeline.py idle --how matmul --ranks 2
    python benchmarks/pipeline.py idle --how wait --ranks 4
    python benchmarks/pipeline.py torch --ranks 2

Stages that compute with matrix products can be measured with as many ranks as there are cores. With `--how wait` a
stage's forward and backward are waits of a set length that leave the core to others: this measures what the schedule,
the messages and their order cost, and nothing of how computing and messages disturb each other.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn

SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1))


class Wait(torch.autograd.Function):
    """Takes a time forward, and a time backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class Shift(nn.Module):
    """Has a parameter before the first product, so that the first stage's backward is as long as the others'."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Waiting(nn.Module):
    """A layer that takes as long forward as for the gradient of its input and for that of its weight."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Wait.apply(x + Wait.apply(self.bias, 0.0, self.seconds), self.seconds, self.seconds)


def layers(how: str, count: int, width: int, seconds: float) -> list[nn.Module]:
    if how == "wait":
        return [Waiting(width, seconds) for _ in range(count)]

    def layer() -> nn.Module:
        return nn.Sequential(Shift(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    return [layer() for _ in range(count)]


def idle(asked: argparse.Namespace) -> list[tuple[Any, ...]]:
    """On a rank: (schedule, stages per rank, micro-batches, formula, idle share: median, least; step seconds)."""
    from hocket.parallel.mesh.world import current
    from hocket.parallel.pipeline import Pipeline, bubble, idle_shares, split

    world = current()
    found = []
    for schedule, per_rank in SCHEDULES:
        torch.manual_seed(0)
        stages = world.size * per_rank
        model = nn.Sequential(*layers(asked.how, stages, asked.width, asked.seconds / per_rank))
        sample = (torch.randn(2, asked.width),)
        points = tuple(str(i) for i in range(1, stages))
        mine = split(model, stages, sample, points=points, verify=False)[world.rank :: world.size]
        for micro in asked.micro:
            if schedule != "gpipe" and micro < world.size:
                continue
            pipeline = Pipeline(mine, world, schedule, micro, nn.functional.mse_loss)
            inputs = torch.randn(micro * asked.samples, asked.width)
            target = torch.zeros(micro * asked.samples, asked.width)
            shares, steps = [], []
            for _ in range(asked.rounds + 1):
                torch.distributed.barrier()
                begin_s = time.perf_counter()
                pipeline.step((inputs,), target)
                steps.append(time.perf_counter() - begin_s)
                shares.append(statistics.mean(idle_shares(world.from_all(pipeline.spans))))
            # ZB1P with a forward, backward of inputs and backward of weights of equal length: Qi et al. 2023, table 2
            zero = (world.size - 1) / (world.size - 1 + 3 * micro)
            formula = zero if schedule == "zero_bubble" else bubble(world.size, micro, per_rank)
            share, step_s = statistics.median(shares[1:]), statistics.median(steps[1:])
            found.append((schedule, per_rank, micro, formula, share, min(shares[1:]), step_s))
    return found


class Systems:
    """The same stages under our pipeline, on our backend and on Gloo, and under torch's own on Gloo."""

    def __init__(self, schedule: str, micro: int, width: int, samples: int, group: Any) -> None:
        import torch.distributed as dist
        from torch.distributed import pipelining

        from hocket.parallel.mesh.world import World, current
        from hocket.parallel.pipeline import Pipeline, split

        ours = current()
        self._last = ours.rank == ours.size - 1
        torch.manual_seed(0)
        model = nn.Sequential(*layers("matmul", ours.size, width, 0.0))
        points = tuple(str(i) for i in range(1, ours.size))
        mine = split(model, ours.size, (torch.randn(2, width),), points=points)[ours.rank :: ours.size]
        self._inputs = torch.randn(micro * samples, width)
        self._target = torch.zeros(micro * samples, width)
        self._given = (self._inputs,) if ours.rank == 0 else ()
        loss_fn = nn.functional.mse_loss
        self._pipelines = {
            "hocket": Pipeline(mine, ours, schedule, micro, loss_fn),
            "hocket on gloo": Pipeline(mine, World(ours.rank, ours.size, group), schedule, micro, loss_fn),
        }
        stage = pipelining.PipelineStage(model[ours.rank], ours.rank, ours.size, torch.device("cpu"), group=group)
        kinds = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
        self._plain = kinds[schedule](stage, micro, loss_fn=loss_fn)
        self._broadcast = lambda loss: dist.broadcast(loss, group=group, group_src=ours.size - 1)
        self.names = (*self._pipelines, "torch")

    def step(self, name: str) -> None:
        """A step of one of them; all know the loss on every rank afterwards."""
        if name in self._pipelines:
            self._pipelines[name].step((self._inputs,), self._target)
            return
        losses: list[torch.Tensor] = []
        self._plain.step(*self._given, target=self._target if self._last else None, losses=losses)
        loss = torch.stack(losses).mean().double() if losses else torch.zeros((), dtype=torch.float64)
        self._broadcast(loss.detach())


def beside_torch(asked: argparse.Namespace) -> list[tuple[Any, ...]]:
    """On a rank: (schedule, micro-batches, bytes that cross, seconds of each system's steps)."""
    import torch.distributed as dist

    from hocket.parallel.mesh.world import current

    world = current()
    group = dist.new_group(backend="gloo")
    found = []
    for width, samples in ((64, 4), (256, 16), (512, 64), (1024, 128)):
        for schedule in ("gpipe", "1f1b"):
            for micro in (k for k in asked.micro if k >= world.size):
                systems = Systems(schedule, micro, width, samples, group)
                times: dict[str, list[float]] = {name: [] for name in systems.names}
                for turn in range(asked.rounds + 1):
                    for name, spent in times.items():
                        systems.step(name)  # does not count: pays for what its predecessor left
                        dist.barrier()
                        begin_s = time.perf_counter()
                        systems.step(name)
                        slowest_s = max(world.from_all(time.perf_counter() - begin_s))
                        if turn:
                            spent.append(slowest_s)
                found.append((schedule, micro, samples * width * 4, times))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["idle", "torch"])
    parser.add_argument("--how", choices=["matmul", "wait"], default="matmul")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro", type=lambda text: [int(k) for k in text.split(",")], default=[2, 4, 8, 16])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--samples", type=int, default=512, help="of a micro-batch, idle only")
    parser.add_argument("--seconds", type=float, default=0.02, help="of a stage's forward, --how wait only")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()

    from hocket.testing import run_ranks

    if asked.how == "wait":
        asked.width, asked.samples = 64, 4
    if asked.what == "idle":
        rows = run_ranks(idle, asked.ranks, asked, timeout_s=580)[0]
        head = ("schedule", "stages per rank", "micro-batches", "formula", "idle", "points apart", "least", "step ms")
        print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
        for schedule, per_rank, micro, formula, share, least, step_s in rows:
            apart = f"{100 * (share - formula):+.1f}"
            shown = f"{formula:.1%}", f"{share:.1%}", apart, f"{least:.1%}", f"{step_s * 1e3:.1f}"
            cells = (schedule, per_rank, micro, *shown)
            print(f"| {' | '.join(str(cell) for cell in cells)} |")
        return
    rows = run_ranks(beside_torch, asked.ranks, asked, timeout_s=580)[0]
    head = ("schedule", "micro-batches", "bytes across", "hocket ms", "hocket on gloo ms", "torch on gloo ms", "ratio")
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for schedule, micro, nbytes, times in rows:
        medians = {name: statistics.median(spent) for name, spent in times.items()}
        cells = " | ".join(f"{medians[name] * 1e3:.2f}" for name in ("hocket", "hocket on gloo", "torch"))
        print(f"| {schedule} | {micro} | {nbytes} | {cells} | {medians['torch'] / medians['hocket']:.2f} |")


if __name__ == "__main__":
    main()
