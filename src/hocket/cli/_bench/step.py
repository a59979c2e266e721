"""Measures one training step of two models under several data-parallel systems in the same processes."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hocket
from hocket.workloads.edsr.model import EDSR

from .rank import Rank, Sample, p90

SYSTEMS = ("ddp-gloo", "ddp-hocket", "hocket")
_UNMEASURED = 1
_SAMPLES_A_TURN = 3
_WIDTH = 4096


def heavy() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """50 million parameters and a batch of 4: much to communicate for little computation."""
    half = _WIDTH // 2
    layers: list[nn.Module] = [nn.Linear(half, _WIDTH)]
    for width in (_WIDTH, _WIDTH, half):
        layers += [nn.ReLU(), nn.Linear(_WIDTH, width)]
    return nn.Sequential(*layers), torch.randn(4, half), torch.randn(4, half)


def edsr() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """EDSR baseline (16 blocks of 64 features, x2) on four patches of 24 pixels."""
    model = EDSR("baseline", scale=2)
    return model, torch.rand(4, 3, 24, 24), torch.rand(4, 3, 48, 48)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]]] = {"heavy": heavy, "edsr": edsr}


def work() -> None:
    """Do everything that one rank does."""
    rank = Rank()
    rows = []
    for name in rank.spec["models"]:
        steps = {system: _step(rank, name, system) for system in SYSTEMS}
        samples: dict[str, list[Sample]] = {system: [] for system in SYSTEMS}
        for number in range(rank.spec["rounds"]):
            rank.say(f"{name}, round {number + 1} of {rank.spec['rounds']}")
            for system, step in steps.items():
                for _ in range(_UNMEASURED):
                    step()
                for _ in range(_SAMPLES_A_TURN):
                    samples[system].append(rank.measure(step))
        slowest = {system: sorted(rank.slowest(own)) for system, own in samples.items()}
        reference_s = statistics.median(slowest["ddp-gloo"])
        for system, times in slowest.items():
            median_s = statistics.median(times)
            rows.append(
                {
                    "model": name,
                    "system": system,
                    "n": rank.n,
                    "median_s": median_s,
                    "p90_s": p90(times),
                    "speedup_over_ddp_gloo": reference_s / median_s,
                }
            )
    rank.report({"rows": rows})


def _step(rank: Rank, name: str, system: str) -> Callable[[], None]:
    torch.manual_seed(0)
    module, inputs, targets = MODELS[name]()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    model: Any
    if system == "hocket":
        model, optimizer, _ = hocket.distribute(module, optimizer)
    elif system == "ddp-hocket":
        model = DistributedDataParallel(module)
    else:
        model = DistributedDataParallel(module, process_group=rank.gloo)

    def step() -> None:
        optimizer.zero_grad()
        loss: Any = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    work()
