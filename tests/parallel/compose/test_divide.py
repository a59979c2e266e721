"""What cannot be divided is one error on every rank, whichever rank meets it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.parallel.pipeline import SplitError
from hocket.planner import Plan
from hocket.testing import run_ranks


class Penalised(nn.Module):
    """Differentiates what its layers have computed, as a gradient penalty does: no step by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)[0].norm(dim=1)


def said_of_steps_that_differentiate() -> str:
    model = Penalised()
    plan, optimizer = Plan(pipeline_parallel_degree=2, micro_batches=2), torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(SplitError) as error:
        hocket.Trainer(model, F.mse_loss, optimizer, plan, sample=torch.randn(8, 4))
    return str(error.value)


def test_a_step_that_rank_0_alone_fails_to_measure_is_told_to_all() -> None:
    """The others waited for its measurement until the time-out."""
    for said in run_ranks(said_of_steps_that_differentiate, 2):
        assert "the model cannot be taken apart into steps (RuntimeError: The differentiated Tensor" in said
