"""Time to a target with relaxed synchronisation beside synchronous training, with and without a slow worker.

    python -m benchmarks.relaxed measure --task digits --seeds 3 > digits.jsonl
    python -m benchmarks.relaxed measure --task language --seeds 3 > language.jsonl
    python -m benchmarks.relaxed table digits.jsonl language.jsonl
    python -m benchmarks.relaxed histogram digits.jsonl --rule stale:8 > docs/staleness.svg

Every worker sleeps for `--device` seconds at each step, which stands for a device that computes while the CPU is free:
four workers that really computed would wait for each other's cores on a small machine, and measure that. In the slow
runs worker 0 sleeps `--slower` times as long. Networks, gradients and updates are real. All rules train on the same
batches by the same learning rate, which was chosen for synchronous training. Time is that of training: from the first
step until the models are alike again at the end of an epoch, the evaluations between not counted; when the target was
passed is interpolated between the last two evaluations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

import hocket
from hocket.testing import run_ranks

WORKERS = 4
RULES = ("every_step", "local:4", "local:16", "stale:2", "stale:8", "ssp:4", "hogwild")


class Digits:
    """A small convolutional network on 8 x 8 pictures of digits; the target is the accuracy on a fifth of them."""

    target, better, batch, most_rounds = 0.96, "higher", 64, 30

    def __init__(self) -> None:
        from sklearn.datasets import load_digits  # not a dependency of hocket

        pictures, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))
        x = torch.tensor(pictures[order] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        y = torch.tensor(labels[order])
        self.test = x[:360], y[:360]
        self.training: Dataset[Any] = ConcatDataset([TensorDataset(x[360:], y[360:])] * 2)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 10),
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target)

    def judge(self, model: nn.Module) -> float:
        inputs, labels = self.test
        return float((model(inputs).argmax(1) == labels).double().mean())


class Language:
    """The bundled language model, tiny; the target is the loss in nats a byte on text that it has never seen."""

    target, better, batch, most_rounds = 2.5, "lower", 64, 25

    def __init__(self) -> None:
        from hocket.workloads.language_model import data
        from hocket.workloads.language_model.settings import SIZES

        texts, context = data.load(), SIZES["tiny"].context
        self.training: Dataset[Any] = data.Excerpts(texts.training, context, length=64 * 40)
        pages = data.Pages(texts.held_out, context)
        some = [pages[i] for i in range(0, len(pages), 4)]
        self.test = torch.stack([x for x, _ in some]), torch.stack([y for _, y in some])

    def model(self) -> nn.Module:
        from hocket.workloads.language_model.model import GPT

        return GPT("tiny")

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.95))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def judge(self, model: nn.Module) -> float:
        inputs, following = self.test
        return float(self.loss(model(inputs), following))


TASKS = {"digits": Digits, "language": Language}


def train(name: str, rule: str, seed: int, device_s: float, slower: float) -> dict[str, Any]:
    """One run on this rank, until the target is reached at the end of a round."""
    torch.manual_seed(seed)
    task = TASKS[name]()
    model = task.model()
    pause_s = device_s * (slower if dist.get_rank() == 0 else 1.0)

    def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(pause_s)  # in the middle of the gradient, as computing would be
        return task.loss(output, target)

    trainer = hocket.Trainer(model, slow_loss, task.optimizer(model), hocket.Plan(synchronisation=rule))
    loader = DataLoader(task.training, batch_size=task.batch, shuffle=True, drop_last=True)
    took_s, curve, reached = 0.0, [], False
    for _ in range(task.most_rounds):
        dist.barrier()
        began_s = time.perf_counter()
        for batch in trainer.batches(loader):
            trainer.step(batch)
        dist.barrier()
        took_s += time.perf_counter() - began_s
        model.eval()
        with torch.no_grad():
            value = task.judge(model)
        model.train()
        curve.append((took_s, value))
        reached = value >= task.target if task.better == "higher" else value <= task.target
        decided = torch.tensor(float(reached))
        dist.broadcast(decided, src=0)  # one answer for all, whatever the last digit
        if decided:
            break
    relaxed = trainer.report()["relaxed"]
    trainer.close()
    return {
        "task": name,
        "rule": rule,
        "seed": seed,
        "slower": slower,
        "device_s": device_s,
        "reached": reached,
        "seconds": crossing_s(curve, task.target),
        "rounds": len(curve),
        "steps": trainer.steps,
        "curve": curve,
        "relaxed": relaxed,
    }


def crossing_s(curve: list[tuple[float, float]], target: float) -> float:
    """When the target was passed, by the line between the last two evaluations; the end if it was not."""
    (before_s, before), (after_s, after) = ([(0.0, curve[0][1]), *curve])[-2:]
    if after == before or (after - target) * (before - target) > 0:
        return after_s
    return before_s + (after_s - before_s) * (target - before) / (after - before)


def train_all(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [train(*case) for case in cases]


def measure(options: argparse.Namespace) -> None:
    """Runs all rules in turn for each seed, and prints a line for each run."""
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        cases = [
            (options.task, rule, seed, options.device, slower)
            for rule in options.rules.split(",")
            for slower in (1.0, options.slower)
        ]
        for line in run_ranks(train_all, WORKERS, cases, timeout_s=options.timeout, group_timeout_s=60)[0]:
            print(json.dumps(line), flush=True)


def read(paths: Iterable[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in Path(path).read_text().splitlines() if line.startswith("{")]


def table(options: argparse.Namespace) -> None:
    """Prints a table for each task: median and range over seeds."""
    runs = read(options.files)
    for task in dict.fromkeys(run["task"] for run in runs):
        found = [run for run in runs if run["task"] == task]
        speeds = sorted({run["slower"] for run in found})
        print(f"\n**{task}**, target {TASKS[task].target}, {len({run['seed'] for run in found})} seeds\n")
        print("| rule | " + " | ".join(_heads(speeds)) + " |")
        print("|---" * (1 + len(_heads(speeds))) + "|")
        plain = {slower: _median(_chosen(found, "every_step", slower)) for slower in speeds}
        for rule in dict.fromkeys(run["rule"] for run in found):
            cells = []
            for slower in speeds:
                cells += _cells(_chosen(found, rule, slower), plain[slower])
            print(f"| {rule} | " + " | ".join(cells) + " |")


def _heads(speeds: list[float]) -> list[str]:
    heads = []
    for slower in speeds:
        name = "even" if slower == 1.0 else f"one {slower:g} x slower"
        heads += [f"{name}: s to target", "to sync", "rounds", "s waited by the fast", "updates of the slow"]
        heads.append("staleness mean, most")
        if slower == 1.0:
            heads.pop(-2)
    return heads


def _chosen(runs: list[dict[str, Any]], rule: str, slower: float) -> list[dict[str, Any]]:
    return [run for run in runs if run["rule"] == rule and run["slower"] == slower]


def _median(runs: list[dict[str, Any]]) -> float:
    return statistics.median(run["seconds"] for run in runs)


def _cells(runs: list[dict[str, Any]], plain_s: float) -> list[str]:
    seconds = [run["seconds"] for run in runs]
    rounds = [run["rounds"] for run in runs]
    missed = sum(not run["reached"] for run in runs)
    late = f", {missed} of {len(runs)} never" if missed else ""
    cells = [
        f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}{late})",
        f"{plain_s / statistics.median(seconds):.2f} x",
        f"{statistics.median(rounds):g}",
    ]
    slow = runs[0]["slower"] > 1.0
    if runs[0]["relaxed"] is None:
        return cells + ["", *([""] if slow else []), ""]
    workers = [run["relaxed"]["workers"] for run in runs]
    cells.append(f"{statistics.median(statistics.mean(w['waited_s'] for w in each[1:]) for each in workers):.2f}")
    if slow:
        shares = [each[0]["updates"] / sum(w["updates"] for w in each) for each in workers]
        cells.append(f"{statistics.median(shares):.0%}")
    counts = histogram(runs)
    total = sum(counts.values())
    mean = sum(number * count for number, count in counts.items()) / max(1, total)
    cells.append(f"{mean:.1f}, {max(counts)}" if total else "")
    return cells


def histogram(runs: list[dict[str, Any]]) -> dict[int, int]:
    """The staleness of all updates of all runs."""
    counts: dict[int, int] = {}
    for run in runs:
        for number, count in run["relaxed"]["staleness_of_all"].items():
            counts[int(number)] = counts.get(int(number), 0) + count
    return counts


def draw(options: argparse.Namespace) -> None:
    """Prints an SVG: bars of the histogram of staleness of a rule, for even workers and with a slow one."""
    runs = read(options.files)
    speeds = sorted({run["slower"] for run in runs})
    series = [(slower, histogram(_chosen(runs, options.rule, slower))) for slower in speeds]
    most = max(max(counts) for _, counts in series)
    width, height, left, bottom, top = 640, 300, 60, 45, 40
    step = (width - left - 20) / (most + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="20" font-size="14">{runs[0]["task"]}, {options.rule}: updates by their staleness</text>',
        f'<text x="{(left + width) / 2}" y="{height - 8}" text-anchor="middle">'
        "updates of the receiving worker that the gradient had not seen</text>",
    ]
    for percent in (0, 25, 50, 75, 100):
        y = height - bottom - (height - bottom - top) * percent / 100
        parts.append(f'<path d="M {left} {y:.1f} H {width - 20}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{percent}%</text>')
    for i, (slower, counts) in enumerate(series):
        colour, total = ("#457b9d", "#e76f51")[i % 2], sum(counts.values())
        name = "even workers" if slower == 1.0 else f"one of {WORKERS} {slower:g} x slower"
        for number, count in sorted(counts.items()):
            tall = (height - bottom - top) * count / total
            x = left + number * step + step * (0.1 + 0.4 * i)
            y = height - bottom - tall
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{0.4 * step:.1f}" height="{tall:.1f}" fill="{colour}"/>'
            )
        parts.append(f'<rect x="{width - 200}" y="{top + 18 * i}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{width - 182}" y="{top + 18 * i + 10}">{name}</text>')
    for number in range(most + 1):
        x = left + (number + 0.5) * step
        parts.append(f'<text x="{x:.1f}" y="{height - bottom + 15}" text-anchor="middle">{number}</text>')
    print("\n".join([*parts, "</svg>"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("measure")
    verb.add_argument("--task", choices=list(TASKS), required=True)
    verb.add_argument("--rules", default=",".join(RULES))
    verb.add_argument("--seeds", type=int, default=3)
    verb.add_argument("--first-seed", type=int, default=0)
    verb.add_argument("--device", type=float, default=0.01, help="seconds that a step takes besides")
    verb.add_argument("--slower", type=float, default=4.0, help="how many times as long for worker 0")
    verb.add_argument("--timeout", type=float, default=280.0, help="seconds for all runs of a seed")
    verb.set_defaults(run=measure)
    verb = verbs.add_parser("table")
    verb.add_argument("files", nargs="+")
    verb.set_defaults(run=table)
    verb = verbs.add_parser("histogram")
    verb.add_argument("files", nargs="+")
    verb.add_argument("--rule", default="stale:8")
    verb.set_defaults(run=draw)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    sys.exit(main())
