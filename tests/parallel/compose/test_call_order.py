"""Ranks that call layers in different orders end with an error before a weight is updated."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks


class Branches(nn.Module):
    """Equal branches, called in an order that may be another on each rank, as that of a set of strings is."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turned = turned
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        order = [2, 0, 1] if self.turned and dist.get_rank() else [0, 1, 2]
        outputs = {number: self.branches[number](x) for number in order}
        return sum(outputs[number] * (number + 1) for number in range(3))


def stepped(plan: Plan, turned: bool) -> str:
    model = Branches(turned=turned)
    before = model.branches[0][2].bias.detach().clone() if plan.shard == "none" else None
    x = torch.ones(4, 8)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), plan, sample=x)
    try:
        trainer.step((x, 2 * x))
    except RuntimeError as error:
        assert before is None or torch.equal(model.branches[0][2].bias.detach(), before)
        return str(error)
    return ""


def in_one_order_and_in_two(plan: Plan) -> list[str]:
    return [stepped(plan, turned) for turned in (False, True)]


@pytest.mark.parametrize("plan", [Plan(tensor_parallel_degree=2), Plan(shard="parameters")])
def test_another_order_of_layers_is_refused(plan: Plan) -> None:
    """Layers of one shape got each other's values, without a word."""
    for nothing, said in run_ranks(in_one_order_and_in_two, 2, plan, timeout_s=60):
        assert nothing == ""
        assert "in different orders" in said


class Scaled(nn.Module):
    """Begins with a number, which no rank has a part of, so that the first stage has no sharded block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.layers = nn.Parameter(torch.tensor(1.1)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(torch.tanh(x * self.scale))


def losses(plan: Plan) -> list[float]:
    model, x = Scaled(), torch.ones(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan, sample=x)
    return [float(trainer.step((x, 2 * x))) for _ in range(3)]


@pytest.mark.long
def test_a_stage_without_sharded_blocks_compares_with_the_others() -> None:
    plan = Plan(shard="parameters", pipeline_parallel_degree=2, micro_batches=2, split=("layers.0",), clip_norm=0.1)
    for rank in run_ranks(losses, 4, plan):
        assert rank == pytest.approx(losses(Plan(clip_norm=0.1)), rel=1e-6)
