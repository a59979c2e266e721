"""A parameter of another rank's stage, which a program reads, is told or named, and in-place work on all goes on."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks


def reading() -> tuple[list[str], str, list[tuple[int, ...]], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    averaged = [p.detach().clone() for p in model.parameters()]
    x, plan = torch.randn(8, 4), Plan(pipeline_parallel_degree=2, micro_batches=2, split=("2",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan, sample=x)
    trainer.step((x, x))
    with torch.no_grad():
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)  # each rank does it to what it has
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        norms = [float(p.data.norm()) for p in model.parameters()]
        assert norms.count(0.0) == 4
    try:
        for mine, p in zip(averaged, model.parameters(), strict=True):
            mine.lerp_(p, 0.1)
        raised = ""
    except RuntimeError as error:
        raised = str(error)
    shapes = [tuple(p.shape) for p in copy.deepcopy(model).parameters()]
    return [str(one.message) for one in told], raised, shapes, trainer.state_dict()


def test_parameters_of_another_stage_are_told_where_a_program_reads_them() -> None:
    for rank, (told, raised, shapes, state) in enumerate(run_ranks(reading, 2)):
        name = "2.weight" if rank == 0 else "0.weight"
        home = f"{name!r} is a parameter of another stage, which rank {1 - rank} holds"
        assert [home in one for one in told] == [True]
        assert home in raised
        assert shapes[:4].count((0,)) == 4 * rank
        assert max(float(one.abs().max()) for one in state.values()) < 0.101
