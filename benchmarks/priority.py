"""Step times with gradients sent by priority and without, on an emulated cluster with slow links.

    python benchmarks/priority.py star:hosts=2,bandwidth=100Mbit/s,latency=0us --model vgg

One process on each host trains the same model by four plans in turns, a block of steps each: plain with the default
buckets, plain with buckets as small as the chunks, chunks that cross the border of steps in the order in which
back-propagation makes them, and chunks by priority. A block ends when the last update is made; its time is that of the
slowest rank, divided by its steps. Forward, backward (no communication) and an all_reduce of all gradients (alone) are
timed in the same run: they bound what any order can gain.

With `--how wait` layers wait instead of computing, backward twice as long as forward, and have gradients of the sizes
that are told in `PROFILES`: where there are as many ranks as cores, computing keeps the threads that send from running.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fabric_collectives import slowest

PROFILES = {  # KB of gradients and ms of forward of each layer
    "vgg": [(10, 12), (40, 18), (80, 18), (160, 18), (300, 18), (300, 18), (300, 18), (3000, 12), (500, 6), (20, 2)],
    "resnet": [(20, 9)] * 4 + [(80, 9)] * 4 + [(300, 9)] * 4 + [(800, 9)] * 4,
    "lm": [(800, 2), *[(400, 16)] * 8, (800, 10)],
    "table": [(4500, 4), *[(50, 34)] * 4],
}
SYSTEMS = ("plain", "plain, small buckets", "chunks as made", "priority")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cluster")
    parser.add_argument("--model", choices=("vgg", "resnet", "lm", "table"), default="vgg")
    parser.add_argument("--how", choices=("compute", "wait"), default="wait")
    parser.add_argument("--scale", type=float, default=1.0, help="with --how wait: times the bytes of PROFILES")
    parser.add_argument("--steps", type=int, default=6, help="of a block")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=512, help="KiB of a chunk, and of a small bucket")
    asked = parser.parse_args()

    from hocket.cluster import load
    from hocket.fabric import Fabric

    with Fabric(load(asked.cluster)) as fabric, tempfile.TemporaryDirectory() as directory:
        spec = json.dumps({**vars(asked), "directory": directory})
        command = ["-m", "hocket", "run", "--fabric", fabric.name, "-n", str(len(fabric.hosts))]
        subprocess.run([sys.executable, *command, __file__, "--rank", spec], check=True)
        told = json.loads(Path(directory, "told.json").read_text())
    once = " | ".join(f"{told[name]:.3f}" for name in ("forward_s", "backward_s", "all_reduce_s"))
    cells = []
    for system in SYSTEMS:
        times = told["step_s"][system]
        cells.append(f"{statistics.median(times):.3f} ({min(times):.3f} to {max(times):.3f})")
    plain = min(statistics.median(told["step_s"][system]) for system in SYSTEMS[:2])
    gain = plain / statistics.median(told["step_s"]["priority"])
    print(f"| {asked.model} | {told['nbytes'] / 1e6:.1f} | {once} | {' | '.join(cells)} | {gain:.2f} |")
    print(f"losses apart by {told['apart']:.1e} at most; order sent {told['order']}", file=sys.stderr)


def work(spec: dict[str, Any]) -> None:
    """Everything that one rank does."""
    import copy

    import torch
    import torch.distributed as dist

    import hocket
    from hocket.parallel.data.priority import Prioritised
    from hocket.planner import Plan

    torch.set_num_threads(1)
    dist.init_process_group("hocket")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    if spec["how"] == "compute":
        model, inputs, target = stage(spec["model"], size)
    else:
        model, inputs, target = waiting(spec["model"], spec["scale"], size)
    each = len(target) // size
    mine = inputs[rank * each : (rank + 1) * each], target[rank * each : (rank + 1) * each]

    def loss_fn(output: Any, wanted: Any) -> Any:
        return torch.nn.functional.cross_entropy(output, wanted)

    nbytes = spec["chunk"] * 1024
    plans = {
        "plain": Plan(),
        "plain, small buckets": Plan(bucket_bytes=nbytes),
        "chunks as made": Plan(priority=True, bucket_bytes=nbytes),
        "priority": Plan(priority=True, bucket_bytes=nbytes),
    }
    trainers = {}
    for system, plan in plans.items():
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9)
        trainers[system] = hocket.Trainer(twin, loss_fn, optimizer, plan)
    form = trainers["chunks as made"]._composition.form
    assert isinstance(form, Prioritised)
    form._agreed = lambda: list(reversed(range(len(form._chunks))))  # type: ignore[method-assign]

    gloo = dist.new_group(backend="gloo")
    losses: dict[str, list[float]] = {system: [] for system in SYSTEMS}

    def block(system: str, steps: int) -> None:
        for _ in range(steps):
            losses[system].append(trainers[system].step((inputs, target)))
        trainers[system].finish()

    outputs: list[Any] = []
    forward_s, backward_s, alone_s = [], [], []
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    for _ in range(4):
        forward_s.append(slowest(lambda: outputs.append(loss_fn(model(mine[0]), mine[1])), gloo))
        backward_s.append(slowest(lambda: outputs[-1].backward(), gloo))
        alone_s.append(slowest(lambda: dist.all_reduce(flat), gloo))
    times_s: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for system in SYSTEMS:  # the first steps are not like the others
        block(system, 3)
    for number in range(spec["rounds"]):
        for i in range(len(SYSTEMS)):
            system = SYSTEMS[(i + number) % len(SYSTEMS)]
            times_s[system].append(slowest(lambda name=system: block(name, spec["steps"]), gloo) / spec["steps"])
    if rank == 0:
        curves = {system: [float(loss) for loss in some] for system, some in losses.items()}
        ahead: Any = trainers["priority"]._composition.form
        told = {
            "nbytes": flat.numel() * 4,
            "forward_s": statistics.median(forward_s[1:]),
            "backward_s": statistics.median(backward_s[1:]),
            "all_reduce_s": statistics.median(alone_s[1:]),
            "step_s": times_s,
            "apart": max(
                abs(a / b - 1) for some in curves.values() for a, b in zip(some, curves["plain"], strict=True)
            ),
            "order": ahead._sender._order,
        }
        Path(spec["directory"], "told.json").write_text(json.dumps(told))
    dist.barrier(group=gloo)
    dist.destroy_process_group()


def waiting(name: str, scale: float, size: int) -> tuple[Any, Any, Any]:
    """A model of layers that wait, and a global batch."""
    import torch

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, seconds: float) -> Any:
            ctx.seconds, ctx.shape = seconds, weight.shape
            time.sleep(seconds)
            return x * (1 + weight[0])

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            time.sleep(2 * ctx.seconds)
            return gradients[0], gradients[0].mean().expand(ctx.shape).contiguous(), None

    class Layer(torch.nn.Module):
        def __init__(self, kilobytes: int, milliseconds: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(int(kilobytes * scale * 250)))
            self.seconds = milliseconds / 1e3

        def forward(self, x: torch.Tensor) -> Any:
            return Wait.apply(x, self.weight, self.seconds)  # type: ignore[no-untyped-call]

    model = torch.nn.Sequential(*(Layer(*entry) for entry in PROFILES[name]))
    return model, torch.rand(4 * size, 10), torch.randint(10, (4 * size,))


def stage(name: str, size: int) -> tuple[Any, Any, Any]:
    """The model, and a global batch of made-up samples."""
    import torch
    from torch import nn

    if name == "vgg":  # most bytes in the first of the last layers
        model: Any = nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)),
            *(nn.Flatten(), nn.Linear(1024, 768), nn.ReLU(), nn.Linear(768, 256), nn.ReLU(), nn.Linear(256, 10)),
        )
        return model, torch.rand(24 * size, 3, 32, 32), torch.randint(10, (24 * size,))
    if name == "resnet":
        return _residual(), torch.rand(24 * size, 3, 32, 32), torch.randint(10, (24 * size,))
    if name == "lm":
        return _language(), torch.randint(1000, (16 * size, 64)), torch.randint(1000, (16 * size,))
    table = nn.Sequential(nn.Embedding(16000, 64), nn.Flatten(), nn.Linear(16 * 64, 128), nn.ReLU(), nn.Linear(128, 10))
    return (
        table,
        torch.randint(16000, (256 * size, 16)),
        torch.randint(10, (256 * size,)),
    )  # all bytes in the first layer


def _residual() -> Any:
    """Residual blocks whose bytes grow with depth: 32, 64 and 128 channels."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            stride = 1 if before == after else 2
            self.body = nn.Sequential(
                *(nn.Conv2d(before, after, 3, stride, 1), nn.GroupNorm(8, after), nn.ReLU()),
                *(nn.Conv2d(after, after, 3, 1, 1), nn.GroupNorm(8, after)),
            )
            self.short = nn.Identity() if stride == 1 else nn.Conv2d(before, after, 1, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.body(x) + self.short(x)).relu()

    widths = [(16, 16), (16, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128), (128, 128)]
    blocks = [Block(*pair) for pair in widths]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
    )


def _language() -> Any:
    """A transformer with equal layers between a table and a head of its size, that names the next word."""
    import torch
    from torch import nn

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(1000, 128)
            layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(4)]
            self.layers = nn.Sequential(*layers)
            self.head = nn.Linear(128, 1000)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers(self.words(words))[:, -1])

    return Language()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(json.loads(sys.argv[2]))
    else:
        main()
