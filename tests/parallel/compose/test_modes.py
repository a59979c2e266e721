"""Modes of torch that a program puts around its steps: what they see changes no loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks

Mode = Callable[[], AbstractContextManager[Any]]
PLANS = [
    Plan(),
    Plan(shard="gradients"),
    Plan(shard="parameters"),
    Plan(tensor_parallel_degree=2),
    Plan(pipeline_parallel_degree=2, micro_batches=2),
]


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def trained(plans: Sequence[Plan], mode: Mode) -> list[list[float]]:
    found = []
    for plan in plans:
        torch.manual_seed(0)
        first = nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU()
        model = nn.Sequential(*first, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()
        x, y = torch.randn(8, 8, dtype=torch.float64), torch.randint(4, (8,))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        trainer = hocket.Trainer(model, nn.functional.cross_entropy, optimizer, plan, sample=x)
        with mode():
            found.append([float(trainer.step((x, y))) for _ in range(3)])
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "mode", [Functions, Operators, torch.autograd.graph.save_on_cpu, torch.autograd.detect_anomaly]
)
def test_losses_are_those_of_one_process_inside_modes(mode: Mode) -> None:
    (expected,) = trained([Plan()], nullcontext)
    for rank in run_ranks(trained, 2, PLANS, mode, timeout_s=120):
        for plan, losses in zip(PLANS, rank, strict=True):
            assert losses == pytest.approx(expected, abs=1e-12), plan  # float64: the order of additions alone differs
