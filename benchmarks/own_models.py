"""Twelve models that differ as much as they can: is the planner right with 20 s of calibration?

    python -m benchmarks.own_models --out FOLDER                     all, about 12 minutes
    python -m benchmarks.own_models --out FOLDER --models wide,gru   a look
    python -m benchmarks.own_models --read FOLDER                    the table of what FOLDER holds

None is a bundled workload, and none was looked at when the planner's formulas were made. Each is calibrated on 2 ranks
for 20 s, and all of its plans are predicted, which is written down with the time of day; then they are measured by
turns, as `benchmarks/plans.py` does it. What counts is how far the plan that the planner prefers is behind the best,
and how many of the measured steps lie inside the predictions' 80% intervals. On a machine where nothing else runs.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # ranks are started with this file's path

import hocket
from benchmarks.plans import evened, median_and_worst, predictions, timed, usual
from hocket.calibrate import calibrate, including_loss
from hocket.parallel.mesh import join
from hocket.planner import Plan, PlanError, preferred

TURNS = 12
RANKS = 2


class _Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(-2, -3).flatten(-2))


class _Experts(nn.Module):
    """Each token takes the best two of some experts; here all experts see all tokens, and a gate chooses."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        each = [nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(experts)]
        self.experts = nn.ModuleList(each)

    def forward(self, x: Tensor) -> Tensor:
        score = self.gate(x)
        weight = torch.where(score >= score.topk(2, dim=-1).values[..., -1:], score, -1e9).softmax(-1)
        outputs = torch.stack([one(x) for one in self.experts], -1)
        return x + (outputs * weight.unsqueeze(-2)).sum(-1)


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int, layers: int) -> None:
        super().__init__()
        self.inner, self.out = kind(width, width, layers, batch_first=True), nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x)[0][:, -1])


class _Tables(nn.Module):
    def __init__(self, rows: int, tables: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.top = _mlp(tables * width, 128, 2)

    def forward(self, ids: Tensor) -> Tensor:
        found = [table(ids[:, number]) for number, table in enumerate(self.tables)]
        return self.top(torch.cat(found, 1))


class _Words(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        feed = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))]
        blocks = [nn.Sequential(_Attention(width, 4), _Residual(copy.deepcopy(feed[0]))) for _ in range(layers)]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.blocks(self.embed(ids)))


def _mlp(inputs: int, width: int, layers: int) -> nn.Sequential:
    sizes = [inputs, *[width] * layers]
    pairs = [(nn.Linear(a, b), nn.ReLU()) for a, b in zip(sizes, sizes[1:], strict=False)]
    return nn.Sequential(*(one for pair in pairs for one in pair), nn.Linear(width, 32))


def _convolutions(channels: int, layers: int, groups: int = 1) -> nn.Sequential:
    inner = [
        _Residual(nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, groups=groups), nn.ReLU()))
        for _ in range(layers)
    ]
    ends = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 32))
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *inner, *ends)


def _mixer(width: int, layers: int) -> nn.Sequential:
    def block() -> nn.Module:
        return _Residual(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        )

    return nn.Sequential(*(block() for _ in range(layers)), nn.Linear(width, 32))


def _ids(rows: int, *shape: int) -> Tensor:
    return torch.randint(rows, shape)


# By name what makes the model and a global batch of its inputs.
MODELS: dict[str, Any] = {
    "wide": lambda: (_mlp(1536, 1536, 3), torch.randn(16, 1536)),  # memory-bound: large weights, few samples
    "deep": lambda: (_mlp(128, 128, 60), torch.randn(512, 128)),  # many tiny layers
    "few": lambda: (_mlp(1024, 2048, 2), torch.randn(128, 1024)),  # few huge ones
    "tables": lambda: (_Tables(20_000, 8, 32), _ids(20_000, 2048, 8)),  # embeddings
    "lstm": lambda: (_Recurrent(nn.LSTM, 192, 2), torch.randn(32, 48, 192)),
    "gru": lambda: (_Recurrent(nn.GRU, 96, 3), torch.randn(64, 32, 96)),
    "convolutions": lambda: (_convolutions(48, 8), torch.randn(16, 3, 32, 32)),
    "depthwise": lambda: (_convolutions(96, 8, groups=96), torch.randn(16, 3, 32, 32)),  # bound by memory
    "attention": lambda: (
        nn.Sequential(*(_Attention(128, 4) for _ in range(4)), nn.Linear(128, 32)),
        torch.randn(4, 384, 128),
    ),
    "experts": lambda: (
        nn.Sequential(*(_Experts(128, 256, 4) for _ in range(4)), nn.Linear(128, 32)),
        torch.randn(16, 48, 128),
    ),
    "words": lambda: (_Words(8000, 128, 2), _ids(8000, 8, 48)),  # a large vocabulary
    "mixer": lambda: (_mixer(256, 8), torch.randn(16, 48, 256)),
}


def loss_of(output: Tensor, _: Tensor) -> Tensor:
    """A loss of any output."""
    return output.square().mean()


def rank_main(name: str, file: Path, within_s: float) -> None:
    """Everything of one model; rank 0 writes it down, predictions before anything is measured."""
    torch.manual_seed(0)
    dist.init_process_group("hocket")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, inputs = MODELS[name]()
    size = len(inputs)
    began = time.perf_counter()
    optimizer = torch.optim.Adam(model.parameters())
    found = calibrate(model, optimizer, (inputs,), seconds=within_s)
    if rank == 0:
        found = including_loss(found, model, optimizer, (inputs,), join(), loss_of)
    text: dict[str, Any] = {"model": name, "world": world, "seconds": time.perf_counter() - began}
    given: list[Any] = [None]
    if rank == 0:
        each = predictions(found, world, size)
        given = [
            [{"plan": p.plan.to_json(), "predicted_s": p.step_s, "interval_s": p.interval_s} for p in each],
        ]
        text |= {"workload": str(found.workload), "network": dataclasses.asdict(found.network)}
        text |= {"constants": dataclasses.asdict(found.constants)}
        text |= {"runs": [(run.plan.to_json(), run.step_s) for run in found.runs]}
        text |= {"predicted_at": time.strftime("%Y-%m-%d %H:%M:%S"), "references": len(found.runs), "rows": given[0]}
        file.write_text(json.dumps(text, indent=1))
    dist.broadcast_object_list(given)
    rows, steps = given[0], {}
    batch = (inputs, torch.zeros(size))
    for number, row in enumerate(rows):
        own = copy.deepcopy(model)
        optimizer = torch.optim.Adam(own.parameters(), lr=1e-4)
        try:
            trainer = hocket.Trainer(own, loss_of, optimizer, plan=Plan.from_json(row["plan"]), sample=(inputs,))
            timed(partial(trainer.step, batch), 2)
        except (PlanError, NotImplementedError, ValueError) as error:  # the same on every rank
            row["refused"] = str(error)
            continue
        steps[number] = partial(trainer.step, batch)
        row["steps_s"] = []
    began, turns = time.perf_counter(), 0
    while turns < TURNS:
        for number, step in steps.items():
            rows[number]["steps_s"] += timed(step)
        turns += 1
        late = [time.perf_counter() - began > 0.8 * within_s]
        dist.broadcast_object_list(late)
        if late[0] and turns > 1:
            break
    for number in steps:
        rows[number] |= {"turns": turns, "measured_s": usual(rows[number]["steps_s"])}
    if rank == 0:
        file.write_text(json.dumps(text | {"rows": rows}, indent=1))
    dist.destroy_process_group()


def show(documents: list[dict[str, Any]]) -> None:
    """Print the table, and what is wanted of it."""
    heads = "model, plans, references, planner's pick, behind the best, best measured, error: median, worst, inside"
    print("| " + " | ".join(heads.split(", ")) + " |\n|" + "---|" * len(heads.split(", ")))
    near = inside = every = 0
    errors = []
    for document in documents:
        evened(document)
        rows = [row for row in document["rows"] if "measured_s" in row]
        plans = [Plan.from_json(row["plan"]) for row in rows]
        names = [plan.resolve(document["world"]).describe() for plan in plans]
        pick = preferred([(plan, row["predicted_s"]) for plan, row in zip(plans, rows, strict=True)])
        took = [row["measured_s"] for row in rows]
        best, behind = took.index(min(took)), took[pick] / min(took) - 1
        held = sum(row["interval_s"][0] <= row["measured_s"] <= row["interval_s"][1] for row in rows)
        own = [row["predicted_s"] / row["measured_s"] - 1 for row in rows]
        cells = [document["model"], len(rows), document["references"], names[pick], f"{behind:.1%}", names[best]]
        print("| " + " | ".join(map(str, [*cells, *median_and_worst(own), f"{held} of {len(rows)}"])) + " |")
        near, inside, every = near + (behind <= 0.10), inside + held, every + len(rows)
        errors += own
    print(f"\nThe pick is within 10% of the best in {near} of {len(documents)} models. {inside} of {every} measured")
    print(f"steps ({inside / every:.0%}) lie inside their 80% interval; the errors' median is", end=" ")
    print(f"{statistics.median(map(abs, errors)):.1%}, the worst {max(errors, key=abs):+.1%}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of calibration, and about as long to measure")
    parser.add_argument("--out", type=Path, help="a folder for predictions and what was measured, as JSON")
    parser.add_argument("--read", type=Path, help="measure nothing; print the table of this folder")
    parser.add_argument("--rank", nargs=2, metavar=("MODEL", "FILE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(given.rank[0], Path(given.rank[1]), given.seconds)
        return
    folder = given.read or given.out
    if folder is None:
        parser.error("say --out FOLDER, or --read FOLDER")
    if not given.read:
        folder.mkdir(parents=True, exist_ok=True)
        for name in given.models.split(","):
            words = ["run", "-n", str(RANKS), "--no-run-dir", __file__, "--seconds", str(given.seconds)]
            words += ["--rank", name, str(folder / f"{name}.json")]
            if subprocess.run([sys.executable, "-m", "hocket", *words], check=False, stdout=sys.stderr).returncode:
                print(f"{name} has failed, and is left out", file=sys.stderr)
    documents = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    show([one for one in documents if any("measured_s" in row for row in one["rows"])])


if __name__ == "__main__":
    main()
