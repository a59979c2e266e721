"""Losses that are computed by another way than model(...), and divide by something else than samples, are told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks

SAMPLES, BATCH = 32, 8
Step = Callable[[Any, Tensor, Tensor], Tensor]


class Losing(nn.Module):
    """A model with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        return output

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(x), y)


def said(step: Step) -> list[str]:
    """Train for two epochs; return the warnings."""
    torch.manual_seed(0)
    model = Losing()
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=draw, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, torch.randint(3, (SAMPLES,), generator=draw)), batch_size=BATCH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                step(model, x, y).backward()
                optimizer.step()
    return [str(one.message) for one in caught]


def some(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x[:, 0] > 0.7, -100, y)


def in_chunks(model: Any, x: Tensor, y: Tensor) -> Tensor:
    first, last = (model.loss(*some) / 2 for some in zip(x.chunk(2), y.chunk(2), strict=True))
    first.backward()
    return last


def with_penalty(model: Any, x: Tensor, y: Tensor) -> Tensor:
    (0.01 * model.net[0].weight.square().mean()).backward()
    return torch.as_tensor(model.loss(x, y))


def with_another_model(model: Any, x: Tensor, y: Tensor) -> Tensor:
    functional.cross_entropy(nn.Linear(6, 3).double()(x)[:3], y[:3]).backward()
    return torch.as_tensor(model.loss(x, y))


def told() -> list[list[str]]:
    def by_call(model: Any, x: Tensor, y: Tensor) -> Tensor:
        output = functional_call(model.module, dict(model.named_parameters()), (x,))
        return functional.cross_entropy(output, some(x, y))

    return [said(lambda model, x, y: model.loss(x, some(x, y))), said(by_call)]


def silent() -> list[list[str]]:
    def by_call(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model.module, dict(model.named_parameters()), (x,)), y)

    steps: list[Step] = [
        by_call,
        in_chunks,
        with_penalty,
        with_another_model,
        lambda model, x, y: model.loss(x, y),
        lambda model, x, y: functional.cross_entropy(model(x), some(x, y)),
        lambda model, x, y: sum(model.loss(x[i : i + 1], y[i : i + 1]) for i in range(len(x))) / len(x),
        lambda model, x, y: model.net(x).square().mean(),
    ]
    return [said(step) for step in steps]


def test_losses_of_another_way_that_count_otherwise_are_told() -> None:
    first, second = run_ranks(told, 2, timeout_s=100)
    for one, other in zip(first, second, strict=True):
        assert ["not computed by model(...)" in words for words in one] == [True]
        assert not other


def one_after_another() -> list[list[str]]:
    kept = []

    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        kept.append(model)
        return functional.cross_entropy(model(x), y) / 2

    return [said(step) for _ in range(2)]


def test_a_model_from_before_does_not_disturb_the_look_at_another_ones_losses() -> None:
    for found in run_ranks(one_after_another, 2, timeout_s=100):
        assert not any(found)


@pytest.mark.long
def test_right_ones_are_not() -> None:
    for found in run_ranks(silent, 2, timeout_s=100):
        assert not any(found)
