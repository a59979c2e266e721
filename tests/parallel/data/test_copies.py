"""Parameters that are sharded among the ranks of a host, while other hosts hold copies (HSDP)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.planner import Plan
from hocket.profile import Recorder
from hocket.testing import run_ranks

from ...comm import host_world
from .. import trainer_programs
from ..compose.test_trainer import check

AMONG_TWO: dict[str, Any] = {"shard": "parameters", "shard_degree": 2}
TWO_HOSTS = (0, 0, 1, 1)
WIDTH, BLOCKS = 64, 4


@pytest.mark.long
def test_the_losses_are_those_of_one_process() -> None:
    wanted = [
        ("mlp", "adam", Plan(**AMONG_TWO, clip_norm=0.5)),
        ("words", "sgd", Plan(**AMONG_TWO, clip_norm=0.5)),
        ("mlp", "adam", Plan(**AMONG_TWO, accumulate=3, recompute=True)),
        ("tables", "adam", Plan(**AMONG_TWO)),
    ]
    check(host_world.run(TWO_HOSTS, trainer_programs.train_all, wanted), wanted)


@pytest.mark.long
def test_among_three_whose_sums_fsdp_divides_after_the_average_has_begun() -> None:
    among_three: dict[str, Any] = {"shard": "parameters", "shard_degree": 3}
    wanted = [("mlp", "sgd", Plan(**among_three)), ("words", "sgd", Plan(**among_three, accumulate=2))]
    check(run_ranks(trainer_programs.train_all, 6, wanted, timeout_s=115), wanted)


@pytest.mark.long
def test_with_tensors_and_stages_that_are_divided() -> None:
    wanted = [
        ("mlp", "sgd", Plan(**AMONG_TWO, pipeline_parallel_degree=2, micro_batches=2, clip_norm=0.5)),
        ("words", "adam", Plan(**AMONG_TWO, tensor_parallel_degree=2, clip_norm=0.5)),
    ]
    check(run_ranks(trainer_programs.train_all, 8, wanted, timeout_s=115), wanted)


class Seldom(nn.Module):
    """Has a layer that only samples with large numbers use, and that is not called where there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = x.amax(1, keepdim=True) > 50
        for number, block in enumerate(self.blocks):
            if number != 1:
                x = x + block(x / 100)
            elif large.any():
                x = x + block(x / 100) * large
        return x


def seldom(plan: Plan) -> tuple[list[list[float]], list[dict[str, Any]]]:
    """Return the weights after each of two steps, and what was sent in the second."""
    torch.manual_seed(0)
    model = Seldom().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan)
    x, y = torch.randn(16, WIDTH, dtype=torch.float64), torch.randn(16, WIDTH, dtype=torch.float64)
    x[torch.arange(0, 16, 4)] *= 100  # in the first part of every rank's batch, and in no second one
    x[torch.arange(0, 16, 4), 0] = 60
    weights = []
    for _ in range(2):
        with Recorder() as recorder:
            trainer.step((x, y))
        weights.append([value.double().sum().item() for value in trainer.state_dict().values()])
    return weights, recorder.events()


def test_a_block_that_the_last_pass_does_not_use_is_averaged_too() -> None:
    expected, _ = seldom(Plan())
    for found, _ in run_ranks(seldom, 4, Plan(**AMONG_TWO, accumulate=2)):
        for step, wanted in zip(found, expected, strict=True):
            assert step == pytest.approx(wanted, rel=1e-11)


def blocks(accumulate: int) -> list[dict[str, Any]]:
    """Return what was sent in the third of three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(**AMONG_TWO, accumulate=accumulate)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan)
    for _ in range(3):
        with Recorder() as recorder:
            trainer.step((torch.randn(16, WIDTH), torch.randn(16, WIDTH)))
    return [event for event in recorder.events() if event.get("nbytes", 0) > 1000]


@pytest.mark.long
def test_copies_average_each_block_once_a_step_while_others_are_computed() -> None:
    whole = 4 * (WIDTH * WIDTH + WIDTH)
    for events in host_world.run(TWO_HOSTS, blocks, 3):
        averaged = [event for event in events if event["kind"] == "all_reduce"]
        reduced = [event for event in events if event["kind"] == "reduce_scatter"]
        assert [event["nbytes"] for event in averaged] == [whole // 2] * BLOCKS
        assert [event["nbytes"] for event in reduced] == [whole] * 3 * BLOCKS
        assert all(event["asynchronous"] for event in averaged)
        assert averaged[0]["posted_s"] < reduced[-1]["posted_s"]


def kept(folder: Path) -> list[float]:
    """Train one step, and another with another plan from what the first has kept."""
    found = []
    for plan in (Plan(**AMONG_TWO), Plan(shard="optimizer"), Plan(**AMONG_TWO)):
        torch.manual_seed(3 + len(found))
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2)).double()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan)
        if found:
            trainer.load(folder / str(len(found) - 1))
        torch.manual_seed(9)
        found.append(float(trainer.step((torch.randn(8, 6).double(), torch.randn(8, 2).double()))))
        trainer.save(folder / str(len(found) - 1))
    return found


@pytest.mark.long
def test_checkpoints_go_from_copies_to_other_plans_and_back(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(9)
    x, y = torch.randn(8, 6).double(), torch.randn(8, 2).double()
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for found in run_ranks(kept, 4, tmp_path):
        assert found == pytest.approx(expected, rel=1e-11)
