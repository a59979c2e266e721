"""A model that has no memory yet is divided in the memory of a rank's part and one block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.parallel.state import give_back, process_memory
from hocket.planner import Plan
from hocket.testing import run_ranks

MIB = 2**20
WIDTH = 512
BLOCK_NBYTES = 8 * WIDTH * WIDTH * 4


class Residual(nn.Module):
    """A perceptron of 8 MiB, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def perceptrons(blocks: int) -> nn.Module:
    return nn.Sequential(*(Residual() for _ in range(blocks)))


def risen(plan: Plan, blocks: int, samples: int) -> int:
    """By how many bytes the peak of this process rises while a model is built."""

    def build(blocks: int, samples: int) -> Any:
        made = hocket.deferred(perceptrons, blocks)
        return hocket.Trainer(made, nn.functional.mse_loss, torch.optim.SGD, plan, sample=torch.rand(samples, WIDTH))

    build(2, 8)  # imports what any building needs
    give_back()
    before = process_memory()["resident"]
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    build(blocks, samples)
    return process_memory()["peak"] - before


@pytest.mark.long
@pytest.mark.parametrize(
    "plan", [Plan(tensor_parallel_degree=2), Plan(pipeline_parallel_degree=2)], ids=["tensor", "pipeline"]
)
def test_ranks_that_share_a_model_never_hold_the_whole(plan: Plan) -> None:
    # Of 12 blocks a rank has 48 MiB, and activations of all 512 samples would take 108 MiB.
    for nbytes in run_ranks(risen, 2, plan, 12, 512, timeout_s=60):
        assert nbytes < 6 * BLOCK_NBYTES + 4 * BLOCK_NBYTES + 32 * MIB, nbytes / MIB


@pytest.mark.long
def test_what_ranks_share_in_two_ways_is_never_there_as_shared_in_one() -> None:
    plan = Plan(tensor_parallel_degree=2, shard="parameters")
    for nbytes in run_ranks(risen, 4, plan, 24, 64, timeout_s=100):
        assert nbytes < 6 * BLOCK_NBYTES + 4 * BLOCK_NBYTES + 32 * MIB, nbytes / MIB
