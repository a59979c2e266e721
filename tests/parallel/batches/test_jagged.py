"""Nested tensors of samples of any length, in the jagged layout: batches of them are shared out and cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks

from ..plain_loop import losses

PLANS: list[tuple[dict[str, Any], bool]] = [  # each with whether its batches are those of `Trainer.batches`
    ({}, True),
    ({"accumulate": 2}, False),
    ({"shard": "parameters"}, True),
    ({"tensor_parallel_degree": 2}, False),
]


class Means(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([one.mean(0) for one in self.b(self.a(x).relu()).unbind()])


def collated(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.nested.nested_tensor([x for x, _ in samples], layout=torch.jagged), torch.stack(
        [y for _, y in samples]
    )


def loader() -> Any:
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(n % 5 + 2, 4, generator=generator, dtype=torch.float64) for n in range(24)]
    return torch.utils.data.DataLoader([(x, x[0]) for x in data], 8, collate_fn=collated)


def made() -> tuple[Means, torch.optim.Optimizer]:
    model = Means()
    return model, torch.optim.SGD(model.parameters(), 0.1)


def stepped(plan: dict[str, Any], *, shared: bool) -> list[float]:
    model, optimizer = made()
    trainer = hocket.Trainer(model, F.mse_loss, optimizer, Plan(**plan), sample=next(iter(loader()))[0])
    return [float(trainer.step(batch)) for batch in (trainer.batches(loader()) if shared else loader())]


def all_losses() -> list[list[float]]:
    found = [losses(*hocket.distribute(*made(), batches)) for batches in (loader(), list(loader()))]
    return found + [stepped(plan, shared=shared) for plan, shared in PLANS]


@pytest.mark.long
def test_batches_of_jagged_tensors_are_shared_out_and_cut() -> None:
    expected = losses(*made(), loader())
    for found in run_ranks(all_losses, 2, timeout_s=120):
        assert found == [pytest.approx(expected, rel=1e-12)] * len(found)
