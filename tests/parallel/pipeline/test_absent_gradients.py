"""What lies behind a `detach()` at a cut has no gradient, as in one process: its weights do not decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks


class Quantised(nn.Module):
    """Takes the nearest code, straight through: the codes have no gradient, but where `also` gives them some."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.codes = nn.Linear(8, 8), nn.Embedding(5, 8)
        self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made = torch.tanh(self.first(x))
        code = self.codes(torch.cdist(made, self.codes.weight).argmin(1))
        through = made + (code - made).detach()
        return self.last(torch.tanh(self.middle(through))), made, code


def _trained(fields: dict[str, Any], also_from: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and what is left of four steps, the later of which have a term of the codes."""
    torch.manual_seed(0)
    model, x, y = Quantised().double(), torch.randn(8, 8).double(), torch.randn(8, 8).double()
    steps = 0

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        out, made, code = output
        loss = nn.functional.mse_loss(out, target)
        return loss + nn.functional.mse_loss(code, made.detach()) if steps >= also_from else loss

    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    trainer = hocket.Trainer(model, loss_fn, optimizer, Plan(**fields), sample=x)
    losses = []
    for steps in range(4):  # noqa: B007 - the loss goes by it
        losses.append(float(trainer.step((x, y))))
    return losses, trainer.state_dict()


PIPELINE: dict[str, Any] = {"pipeline_parallel_degree": 2, "split": ("middle",)}
PLANS: list[dict[str, Any]] = [
    {**PIPELINE, "micro_batches": 2},
    {**PIPELINE, "micro_batches": 4, "pipeline_schedule": "zero_bubble"},
    {**PIPELINE, "micro_batches": 2, "recompute": True},
]


def _by_plans(also_from: int) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    return [_trained(fields, also_from) for fields in PLANS]


@pytest.mark.parametrize("also_from", [4, 2, 0])
def test_codes_behind_a_detach_decay_only_where_they_have_a_gradient(also_from: int) -> None:
    """Zeros came back for them, and AdamW let them decay: 9e-5 off in the next loss, and silent."""
    losses, state = _trained({}, also_from)
    for rank in run_ranks(_by_plans, 2, also_from):
        for found, left in rank:
            assert found == pytest.approx(losses, rel=1e-12)
            for name, value in left.items():
                torch.testing.assert_close(value, state[name], rtol=1e-10, atol=1e-13, msg=name)
