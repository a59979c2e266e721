"""What cannot be divided is one error on every rank, whichever rank meets it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket.parallel.pipeline import SplitError
from hocket.planner import SPLIT_REASON, Plan
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


def trained_with_stages_that_a_model_lacks(reasons: dict[str, str]) -> tuple[list[str], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    plan = Plan(pipeline_parallel_degree=2, micro_batches=2, split=("block7",), reasons=reasons)
    x, y = torch.randn(8, 4).double(), torch.randn(8, 1).double()
    trainer = hocket.Trainer(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.1), plan, sample=x)
    losses = [float(trainer.step((x, y))) for _ in range(3)]
    return trainer.report()["notes"], losses


def test_stages_that_the_search_has_named_and_a_model_lacks_are_cut_by_computation() -> None:
    """The search knows a workload's layers, which may be a shape's, and not what the model's code does between them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x, y = torch.randn(8, 4).double(), torch.randn(8, 1).double()
    optimizer, plain = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        plain.append(loss.item())
    for notes, losses in run_ranks(trained_with_stages_that_a_model_lacks, 2, {"split": SPLIT_REASON}):
        assert losses == pytest.approx(plain, rel=1e-12)
        assert any("cut by computation" in note and "'block7'" in note for note in notes)


def refused_stages_that_a_model_lacks() -> str:
    with pytest.raises(SplitError) as error:
        trained_with_stages_that_a_model_lacks({})
    return str(error.value)


def test_stages_that_a_user_has_named_and_a_model_lacks_are_refused() -> None:
    for said in run_ranks(refused_stages_that_a_model_lacks, 2):
        assert "split names 'block7', which the model does not use" in said
