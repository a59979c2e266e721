"""Sparse buffers (the adjacency of a graph, heads that a model marks): plans keep them, and checkpoints have them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.planner import Plan
from hocket.sharding import same_values, set_values
from hocket.testing import run_ranks

from ..plain_loop import losses

LAYOUTS = {"coo": torch.sparse_coo, "csr": torch.sparse_csr, "csc": torch.sparse_csc}
PLANS: dict[str, dict[str, Any]] = {
    "data": {},
    "sharded": {"shard": "parameters"},
    "accumulate": {"accumulate": 2, "recompute": True},
    "tensor": {"tensor_parallel_degree": 2},
    "pipeline": {"pipeline_parallel_degree": 2, "micro_batches": 2},
}


class Graph(nn.Module):
    """Adds to each number its neighbour's; `edges` more than one there are."""

    def __init__(self, layout: str, edges: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
        near = torch.eye(8).roll(1, 0)
        near[edges:] = 0
        self.register_buffer("near", near.to_sparse(layout=LAYOUTS[layout]))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).relu()
        return self.b(x + torch.sparse.mm(self.near, x.T).T)


def batches() -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 8, 4, generator=generator, dtype=torch.float64)) for _ in range(3)]


def of_one_process(layout: str) -> list[float]:
    model = Graph(layout, 6)
    return losses(model, torch.optim.SGD(model.parameters(), 0.1), batches())


def trained(layout: str, folder: str) -> list[tuple[list[float], bool]]:
    """Losses with each plan, where only rank 0 has all edges at first; and whether its own came back."""
    found = []
    for name, settings in PLANS.items():
        model = Graph(layout, 6 if os.environ["RANK"] == "0" else 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = hocket.Trainer(model, F.mse_loss, optimizer, Plan(**settings), sample=batches()[0][:1])
        these = [float(trainer.step(batch)) for batch in batches()]
        trainer.save(f"{folder}/{name}")
        state = trainer.state_dict()
        set_values(model.near, Graph(layout, 2).near)
        trainer.load(f"{folder}/{name}")
        loaded = same_values(model.near, Graph(layout, 6).near)
        set_values(model.near, Graph(layout, 2).near)
        trainer.load_state_dict(state)
        found.append(
            (these, loaded and same_values(model.near, Graph(layout, 6).near) and trainer.memory().weights > 0)
        )
    return found


def looped(layout: str) -> list[float]:
    model = Graph(layout, 6 if os.environ["RANK"] == "0" else 3)
    data = list(zip(*map(torch.cat, zip(*batches(), strict=True)), strict=True))
    return losses(
        *hocket.distribute(model, torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(data, 8))
    )


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans_and_checkpoints_keep_sparse_buffers(layout: str, tmp_path: Any) -> None:
    expected = pytest.approx(of_one_process(layout), rel=1e-12)
    for found in run_ranks(trained, 2, layout, str(tmp_path)):
        for name, (these, kept) in zip(PLANS, found, strict=True):
            assert these == expected, name
            assert kept, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_distribute_sends_sparse_buffers(layout: str) -> None:
    assert run_ranks(looped, 2, layout) == [pytest.approx(of_one_process(layout), rel=1e-12)] * 2
