"""Losses that are computed by another way than model(...): some are told, and refused where samples meet."""

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


def said(step: Step, optimizers: list[Any] | None = None) -> list[str]:
    """Train for two epochs; return the warnings."""
    torch.manual_seed(0)
    model = Losing()
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=draw, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, torch.randint(3, (SAMPLES,), generator=draw)), batch_size=BATCH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    if optimizers is not None:
        optimizers.append(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                step(model, x, y).backward()
                optimizer.step()
    return [str(one.message) for one in caught]


def refused(step: Step, optimizers: list[Any] | None = None) -> str:
    """Return why a loop is refused; nothing where it trains."""
    try:
        said(step, optimizers)
    except RuntimeError as error:
        return str(error)
    return ""


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
        adapted_to_each,
        with_a_penalty_of_gradients,
    ]
    return [said(step) for step in steps]


def contrasted(model: Any, x: Tensor, _: Tensor) -> Tensor:
    one, other = (functional.normalize(model.net(rows), dim=1) for rows in (x, 0.9 * x + 0.1))
    return functional.cross_entropy(one @ other.T, torch.arange(len(x)))


def normalised(model: Any, x: Tensor, y: Tensor) -> Tensor:
    advantages = (x[:, 0] - x[:, 0].mean()) / x[:, 0].std()
    return (functional.cross_entropy(model.net(x), y, reduction="none") * advantages).mean()


def adapted(model: Any, given: tuple[Tensor, Tensor], asked: tuple[Tensor, Tensor]) -> Tensor:
    """The loss after one step of an inner loop."""
    weights = dict(model.named_parameters())
    with model.no_sync():
        inner = functional.cross_entropy(functional_call(model.module, weights, given[:1]), given[1])
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    moved = {name: one - by for (name, one), by in zip(weights.items(), gradients, strict=True)}
    return functional.cross_entropy(functional_call(model.module, moved, asked[:1]), asked[1])


def adapted_to_a_half(model: Any, x: Tensor, y: Tensor) -> Tensor:
    half = len(x) // 2
    return adapted(model, (x[:half], y[:half]), (x[half:], y[half:]))


def adapted_to_each(model: Any, x: Tensor, y: Tensor) -> Tensor:
    rows = [(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    return torch.stack([adapted(model, (0.5 * one, label), (one, label)) for one, label in rows]).mean()


def with_a_penalty_of_gradients(model: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    output = model.net(x)
    (gradients,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return functional.cross_entropy(output, y) + (gradients.norm(dim=1) - 1).square().mean()


class Queue:
    """Keys of batches before, which each rank has from its own samples."""

    def __init__(self) -> None:
        self.keys = torch.ones(4, 3, dtype=torch.float64)

    def loss(self, model: Any, x: Tensor, _: Tensor) -> Tensor:
        output = model.net(x)
        logits = torch.cat([output.sum(1, keepdim=True), output @ self.keys.T], 1)
        self.keys = torch.cat([output.detach(), self.keys])[:6]
        return functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.int64))


class Decided:
    """Lets one rank alone take another learning rate after the second batch, as a scheduler by its loss does."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers, self.batches = optimizers, 0

    def loss(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        self.batches += 1
        if self.batches > 2:
            for group in self.optimizers[0].param_groups:
                group["lr"] = 0.1 / (1 + torch.distributed.get_rank())
        return torch.as_tensor(model.loss(x, y))


def met() -> list[str]:
    def by_rows(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model.net(x), y, reduction="sum")

    steps: list[Step] = [contrasted, normalised, adapted_to_a_half, Queue().loss, by_rows]
    optimizers: list[Any] = []
    return [*(refused(step) for step in steps), refused(Decided(optimizers).loss, optimizers)]


def test_losses_of_another_way_in_which_samples_meet_are_refused_on_all_ranks() -> None:
    first, second = run_ranks(met, 2, timeout_s=100)
    words = [*["depends on other samples"] * 3, "what the loop keeps from batch to batch", "is a sum over samples"]
    words.append("the optimizer is not the same")
    assert [word in one for one, word in zip(first, words, strict=True)] == [True] * 6
    assert first == second


def test_losses_of_another_way_that_count_otherwise_are_told() -> None:
    first, second = run_ranks(told, 2, timeout_s=100)
    for one, other in zip(first, second, strict=True):
        assert ["not computed by model(...)" in words for words in one] == [True]
        assert not other


@pytest.mark.long
def test_right_ones_are_not() -> None:
    for found in run_ranks(silent, 2, timeout_s=100):
        assert not any(found)
