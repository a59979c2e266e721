"""What huge pages, which `hocket run` has ranks take their memory in, do to steps on CPUs: with and without, by turns.

    python -m benchmarks.huge_pages [--rounds 5]

Each turn is a fresh process of torch alone, with one thread: the eight workloads of benchmarks/plans.py with a half of
their batch, as one of two ranks has it, and three models with activations and logits as large as people have them. A
row has, without and with `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`, the median step, processor time of the kernel in it,
its page faults, and the process's peak of resident memory; medians over the rounds, and the spread of the ratio of
steps. On a machine where nothing else runs, whose kernel has transparent huge pages for programs that ask
(`/sys/kernel/mm/transparent_hugepage/enabled` is madvise); where it is always, both columns are alike.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .plans import WORKLOADS, setting

TUNABLES = "glibc.malloc.hugetlb=1"


def images() -> tuple[nn.Module, Callable[[], Tensor]]:
    """Convolutions on 16 photographs of 224 x 224: activations of 98 MiB each."""
    widths, layers = [3, 32, 32], list[nn.Module]()
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    x, y = torch.randn(16, 3, 224, 224), torch.randint(10, (16,))
    return model, lambda: cross_entropy(model(x), y)


def text(layers: int, width: int, samples: int, tokens: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Encoder layers between an embedding and logits of 32,000 tokens."""
    blocks = [nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(layers)]
    model = nn.Sequential(nn.Embedding(32_000, width), *blocks, nn.Linear(width, 32_000))
    x = torch.randint(32_000, (samples, tokens))
    return model, lambda: cross_entropy(model(x).flatten(0, 1), x.flatten())


LARGE: dict[str, Callable[[], tuple[nn.Module, Callable[[], Tensor]]]] = {
    "images of 224 x 224": images,
    "text, 2 layers of 512": lambda: text(2, 512, 4, 128),
    "text, logits of 250 MiB": lambda: text(1, 64, 4, 512),
}


def measured(name: str) -> dict[str, float]:
    """Medians of ten steps after three, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if name in LARGE:
        model, loss = LARGE[name]()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    else:
        made, batch = setting(name)
        model, optimizer = made.model, made.optimizer(made.model)
        half = [one[: len(one) // 2] for one in batch]

        def loss() -> Tensor:
            return made.loss_fn(made.model(*half[:-1]), half[-1])

    steps = []
    for _ in range(13):
        before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        ended, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        steps.append((ended - begun, after.ru_stime - before.ru_stime, after.ru_minflt - before.ru_minflt))
    step_s, kernel_s, faults = (median(one) for one in zip(*steps[3:], strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"step_ms": step_s * 1e3, "kernel_ms": kernel_s * 1e3, "faults": faults, "peak_MiB": peak}


def fresh(name: str, tunables: str) -> dict[str, float]:
    """What a process of its own measures."""
    command = [sys.executable, "-m", "benchmarks.huge_pages", "--one", name]
    environment = {**os.environ, "GLIBC_TUNABLES": tunables}
    found: dict[str, float] = json.loads(subprocess.check_output(command, env=environment, text=True))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measured(asked.one)))
        return
    print(
        "| case | step, ms | of it the kernel | page faults | peak, MiB | with: step | kernel | faults | peak | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in [*WORKLOADS, *LARGE]:
        rounds = [[fresh(name, tunables) for tunables in ("", TUNABLES)] for _ in range(asked.rounds)]
        ratios = [after["step_ms"] / before["step_ms"] for before, after in rounds]
        cells = [
            f"{median(one[way][key] for one in rounds):,.{digits}f}"
            for way in (0, 1)
            for key, digits in (("step_ms", 1), ("kernel_ms", 1), ("faults", 0), ("peak_MiB", 0))
        ]
        ratio = f"**{median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {' | '.join(cells)} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
