"""What a model's steps take, as the planner gets it; and that it then cuts where `split` does."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import nn

from hocket.parallel.pipeline import split, steps_of
from hocket.planner import Constants, Network, Plan, Profile, predict
from hocket.workload import Workload, capture, refined

BATCH, WIDTH = 8, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tied(nn.Module):
    """Its first layer's weights are its last one's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.first.weight)


def test_every_parameter_is_the_first_step_s_that_uses_it() -> None:
    model = Tied()
    steps = steps_of(model, (torch.randn(BATCH, WIDTH),))
    assert sum(one.parameters for one in steps) == sum(one.numel() for one in model.parameters())
    assert sum(one.tensors for one in steps) == len(list(model.parameters()))
    assert steps[0].path == "first"
    assert (steps[0].parameters, steps[-1].parameters) == (WIDTH * WIDTH, 0)
    assert all(one.forward_s >= 0 and one.backward_s >= 0 for one in steps)
    assert sum(one.forward_s + one.backward_s for one in steps) > 0
    inside = next(one for one in steps if one.path == "blocks.1.down")
    assert inside.crossing_bytes == 4 * BATCH * (WIDTH + 64), "what is added, and what the block makes"


@pytest.fixture(scope="module")
def captured() -> tuple[nn.Module, Workload]:
    """With times of the steps that are known, and a layer's their sum: a measurement's own vary."""
    model, random_s = Tied(), random.Random(5)
    steps = [
        one._replace(forward_s=random_s.uniform(1e-4, 1e-3), backward_s=random_s.uniform(1e-4, 2e-3))
        for one in steps_of(model, (torch.randn(BATCH, WIDTH),))
    ]
    found = refined(capture(model, torch.randn(BATCH, WIDTH), degrees=()), steps)
    layers = tuple(
        dataclasses.replace(
            layer,
            forward_s=sum(
                one.forward_s for one, part in zip(steps, found.finer, strict=True) if part.block == layer.name
            ),
            backward_s=sum(
                one.backward_s for one, part in zip(steps, found.finer, strict=True) if part.block == layer.name
            ),
            fixed_share=0.0,
        )
        for layer in found.layers
    )
    return model, refined(dataclasses.replace(found, layers=layers), steps)


@pytest.mark.parametrize("rate_Bps", [1e9, 1e6])
@pytest.mark.parametrize(("ranks", "interleaved"), [(2, 1), (3, 1), (2, 2), (4, 2)])
def test_the_planner_cuts_where_the_trainer_does(
    captured: tuple[nn.Module, Workload], ranks: int, interleaved: int, rate_Bps: float
) -> None:
    model, workload = captured
    network = Network("ranks", ranks, 1, rate_Bps, 1e-4, rate_Bps, rate_Bps, 1e-4, 0.0, 0.0, 1 << 40, 0.0)
    plan = Plan(
        pipeline_parallel_degree=ranks,
        micro_batches=ranks,
        stages_per_rank=interleaved,
        pipeline_schedule="interleaved" if interleaved > 1 else "1f1b",
    )
    found = predict(plan, workload, network, workers=ranks, batch=BATCH * ranks)
    link = Profile(workload, network, Constants()).links(plan.resolve(ranks))[0]
    times = [one.forward_s + one.backward_s for one in workload.finer]
    sample = (torch.randn(BATCH, WIDTH),)
    passes = ranks * interleaved
    stages = split(model, passes, sample, times=times, link=link, micro_batches=passes, verify=False)
    edges = [0, *found.cuts, len(workload.finer)]
    paths = [one.path for one in steps_of(model, sample)]
    modules = {name for name, one in model.named_modules() if not list(one.children())}
    planned = [tuple(p for p in paths[a:b] if p in modules) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    assert [stage.layers for stage in stages] == planned
