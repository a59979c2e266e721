"""What a loss function keeps between batches is that of one process, or is told by name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks

PLANS = {
    "data": Plan(),
    "accumulate": Plan(accumulate=2),
    "pipeline": Plan(pipeline_parallel_degree=2, micro_batches=2),
}


class Centred(nn.Module):
    """The loss of DINO in small: what is compared has a center that follows the batches."""

    def __init__(self, *, largest: bool = False) -> None:
        super().__init__()
        self.largest = largest
        self.register_buffer("center", torch.zeros(3).double())
        self.scale = torch.ones(()).double()  # an attribute that is no buffer

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        loss = ((out - y + self.center) * self.scale).square().mean()
        found = out.detach()
        self.center = 0.9 * self.center + 0.1 * (found.amax(0) if self.largest else found.mean(0))
        self.scale = 0.9 * self.scale + 0.1 * found.square().mean()
        return loss


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(1)).double()
    return [(one, one[:, :3] * one[:, 3:]) for one in x]


def trained(plan: str, *, largest: bool = False, function: bool = False) -> tuple[list[float], list[str]]:
    loss_of, model = Centred(largest=largest), network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = (lambda out, y: loss_of(out, y)) if function else loss_of
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = hocket.Trainer(model, given, optimizer, PLANS[plan], sample=batches()[0][0])
        losses = [float(trainer.step(batch)) for batch in batches()]
    return losses, [str(one.message) for one in caught if "keeps a state" in str(one.message)]


def all_of_them() -> list[Any]:
    return [*(trained(plan, function=plan == "data") for plan in PLANS), trained("data", largest=True)]


def test_the_center_of_a_loss_module_is_that_of_the_whole_batch_or_told() -> None:
    """The check of the first samples left its own marks in it, and ranks and micro-batches a center each."""
    model, loss_of = network(), Centred()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    first, other = run_ranks(all_of_them, 2, timeout_s=90)
    for losses, told in [*first[:3], *other[:3]]:
        assert losses == pytest.approx(expected, rel=1e-10)
        assert told == []
    (line,) = first[3][1]
    assert line.startswith("loss_fn (Centred) keeps a state that depends on the whole batch")
    assert "center by" in line
