"""Tensor-parallel models can be split into the stages of a pipeline, and their blocks computed again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks

from . import tensor_programs as programs


def test_blocks_of_a_cut_model_can_be_computed_again_in_back_propagation() -> None:
    for rank in run_ranks(programs.recomputed, 2, timeout_s=60):
        assert rank["blocks"] == 3
        assert rank["gradients"] < 1e-12


@pytest.mark.long
@pytest.mark.parametrize("sequence", [False, True])
def test_stages_of_a_cut_model_compute_what_the_plain_model_does(sequence: bool) -> None:
    for rank in run_ranks(programs.staged, 2, sequence, timeout_s=90):
        assert rank["gpt"] < 1e-12
        assert rank["cnn"] < 1e-12


class Direct(nn.Module):
    """Parameters that functions use."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = (nn.Parameter(torch.randn(*shape) * 0.2) for shape in ((16, 64), (64, 10)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 1e9):  # never, but it cannot be followed
            return x @ self.into
        return nn.functional.gelu(x @ self.into) @ self.out


class Followed(Direct):
    """The same, without the question."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x @ self.into) @ self.out


def staged() -> tuple[str, list[float], list[float]]:
    """What stages of parts say of a model that cannot be followed, and the losses of one that can."""
    plan = Plan(tensor_parallel_degree=2, pipeline_parallel_degree=2, micro_batches=2)
    torch.manual_seed(0)
    x, y = torch.randn(8, 16), torch.randint(10, (8,))
    refused = ""
    try:
        model: nn.Module = Direct()
        hocket.Trainer(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), plan, sample=x)
    except Exception as error:
        refused = str(error)
    losses = []
    for trains in (False, True):
        torch.manual_seed(1)
        model = Followed().double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if trains:
            trainer = hocket.Trainer(model, nn.functional.cross_entropy, optimizer, plan, sample=x.double())
            losses.append([float(trainer.step((x.double(), y))) for _ in range(3)])
            continue
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.double()), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses[-1].append(float(loss))
    return refused, *losses


@pytest.mark.long
def test_parameters_that_functions_use_are_divided_inside_stages() -> None:
    """After a model that was refused: what it had begun left later ones read as parts, and a KeyError came of it."""
    for refused, alone, divided in run_ranks(staged, 4, timeout_s=100):
        assert "follow" in refused
        assert divided == pytest.approx(alone, rel=1e-12)  # float64: the order of sums
