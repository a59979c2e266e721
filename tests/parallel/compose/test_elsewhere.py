"""A tensor of another rank's stage, which a program reads, is told or named, and in-place work on all goes on."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks


def trained() -> tuple[nn.Module, hocket.Trainer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    x, plan = torch.randn(8, 4), Plan(pipeline_parallel_degree=2, micro_batches=1, split=("2",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan, sample=x)
    trainer.step((x, x))
    return model, trainer


def told(action: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(one.message) for one in caught]


def reading() -> tuple[list[str], str, Any]:
    model, trainer = trained()
    averaged = [torch.zeros(4, 4), torch.zeros(4)] * 4
    with torch.no_grad():
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)  # each rank does it to what it has
    norms: list[float] = []
    warned = told(lambda: norms.extend(float(p.data.norm()) for p in model.parameters()))
    assert norms.count(0.0) >= 4
    try:
        for mine, p in zip(averaged, model.parameters(), strict=False):
            mine.lerp_(p, 0.1)
        raised = ""
    except RuntimeError as error:
        raised = str(error)
    return warned, raised, trainer.state_dict()


def shapes() -> list[Any]:
    model, _ = trained()
    again = copy.deepcopy(model)
    model.zero_grad()
    sizes = [
        (p.numel(), p.shape, p.detach().size(0), p.ndim, len(p.data), p.nbytes)
        for one in (model, again)
        for p in one.parameters()
    ]
    return [sizes, [tuple(b.shape) for b in again.buffers()]]


def gradients() -> list[list[str]]:
    model, _ = trained()
    return [
        told(lambda: [p.grad for p in model.parameters()]),
        told(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        told(lambda: [p.sum() for p in model.buffers()]),
        told(lambda: [p.tolist() for p in model.parameters()]),
        told(lambda: model.zero_grad()),
    ]


def writing() -> tuple[str, Any]:
    model, trainer = trained()
    with torch.no_grad():
        for p in model.parameters():
            p.data.copy_(torch.full(p.shape, 0.5))
            p.mul_(2).add_(torch.ones(p.shape))
        try:
            for p in model.parameters():
                p.data.copy_(torch.zeros(7))
            raised = ""
        except RuntimeError as error:
            raised = str(error)
    return raised, trainer.state_dict()


def saving() -> list[tuple[int, ...]]:
    model, _ = trained()
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    model.load_state_dict(state)
    return [one.shape for one in state.values() if type(one) is torch.Tensor]


def test_parameters_of_another_stage_are_told_where_a_program_reads_them() -> None:
    for rank, (warned, raised, state) in enumerate(run_ranks(reading, 2)):
        name = "2.weight" if rank == 0 else "0.weight"
        home = f"{name!r} is a parameter of another stage, which rank {1 - rank} holds"
        assert [home in one for one in warned] == [True]
        assert home in raised
        assert max(float(one.abs().max()) for name, one in state.items() if name.endswith(("weight", "bias"))) < 0.101


def test_shapes_and_counts_of_another_stage_are_the_wholes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    sizes = [(p.numel(), p.shape, p.size(0), p.ndim, len(p), p.nbytes) for p in model.parameters()]
    for found in run_ranks(shapes, 2):
        assert found == [2 * sizes, [tuple(b.shape) for b in model.buffers()]]


def test_gradients_and_buffers_of_another_stage_are_told_where_a_program_reads_them() -> None:
    for rank, (read, clipped, buffers, lists, zeroed) in enumerate(run_ranks(gradients, 2)):
        weight, mean = ("'2.weight'", "'3.running_mean'") if rank == 0 else ("'0.weight'", "'1.running_mean'")
        held = f"of another stage, which rank {1 - rank} holds"
        assert [f"{weight} is a parameter {held}" in one for one in (*read, *clipped, *lists)] == [True] * 3
        assert [f"{mean} is a buffer {held}" in one for one in buffers] == [True]
        assert "trainer.grad_norm" in read[0]
        assert not zeroed


def test_what_a_program_writes_of_the_wholes_shape_is_written_by_the_rank_that_holds_it() -> None:
    for raised, state in run_ranks(writing, 2):
        assert raised  # 7 values fit no parameter
        assert {
            float(x) for name, one in state.items() if name.endswith(("weight", "bias")) for x in one.flatten()
        } == {2}


def test_what_a_rank_holds_is_saved_without_a_class_of_this_package() -> None:
    for rank, found in enumerate(run_ranks(saving, 2)):
        assert found[:2] == ([(4, 4), (4,)] if rank == 0 else [(0,), (0,)])
        assert len(found) == 14
