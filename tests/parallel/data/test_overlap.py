"""Between hosts, sharded blocks are gathered and reduced while others are computed; the sums stay those of FSDP2."""

from __future__ import annotations

import time
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

WIDTH, BLOCKS, PAUSE_S = 64, 4, 0.05


@pytest.mark.long
def test_passes_add_up_to_what_one_process_has() -> None:
    wanted = [
        ("mlp", "adam", Plan(shard="parameters", clip_norm=0.5)),
        ("words", "sgd", Plan(shard="parameters", clip_norm=0.5)),
        ("mlp", "adam", Plan(shard="parameters", accumulate=3, recompute=True)),
        ("mlp", "sgd", Plan(shard="parameters", pipeline_parallel_degree=2, micro_batches=2, clip_norm=0.5)),
        ("tables", "adam", Plan(shard="parameters")),
    ]
    action = trainer_programs.train_all
    check(host_world.run(range(4), action, wanted), wanted)


class Slow(nn.Module):
    """A layer that takes its time, and notes when it begins and ends."""

    def __init__(self, times: list[tuple[float, float]]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self._times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        time.sleep(PAUSE_S)
        self._times.append((begin, time.perf_counter()))
        return self.layer(x)


def steps(accumulate: int) -> tuple[list[tuple[float, float]], list[dict[str, Any]], list[list[float]]]:
    """When blocks were computed and what was sent in the third of three steps, and the weights after each of them."""
    times: list[tuple[float, float]] = []
    torch.manual_seed(0)
    model = nn.Sequential(*(Slow(times) for _ in range(BLOCKS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, Plan(shard="parameters", accumulate=accumulate))
    batch = torch.randn(16, WIDTH), torch.randn(16, WIDTH)
    weights = []
    for _ in range(3):
        times.clear()
        with Recorder() as recorder:
            trainer.step(batch)
        weights.append([p.full_tensor().double().sum().item() for p in model.parameters()])  # type: ignore[operator]
    events = [event for event in recorder.events() if event.get("nbytes", 0) > 1000]
    return times, events, weights


@pytest.mark.long
def test_the_next_block_is_gathered_while_one_is_computed() -> None:
    for times, events, _ in host_world.run(range(2), steps, 1):
        gathers = [event for event in events if event["kind"] == "all_gather"][:BLOCKS]
        for (begin, end), gather in zip(times[:-1], gathers[1:], strict=True):
            assert gather["posted_s"] < begin
            assert gather["finished_s"] < end
        assert sum(event["kind"] == "reduce_scatter" for event in events) == BLOCKS
        assert all(event["asynchronous"] for event in events)


def test_ranks_of_one_host_wait_for_each_block() -> None:
    for times, events, _ in run_ranks(steps, 2, 1):
        gathers = [event for event in events if event["kind"] == "all_gather"][:BLOCKS]
        for (_, end), gather in zip(times[:-1], gathers[1:], strict=True):
            assert gather["posted_s"] > end


@pytest.mark.long
def test_weights_are_the_same_to_the_bit_whether_anything_goes_on_meanwhile() -> None:
    here = run_ranks(steps, 2, 2)[0][2]
    apart = host_world.run(range(2), steps, 2)[0][2]
    assert apart == here  # two numbers have one sum
