"""What a loop chooses or weighs by the places that samples have in a batch, which are others on a rank, is told of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.parallel.data._exchanged import ExchangedSamples
from hocket.testing import run_ranks

Loss = Callable[[Tensor, Tensor], Tensor]


def each(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().mean(1)


def smallest(losses: Tensor) -> Tensor:
    """As co-teaching has it."""
    return torch.from_numpy(np.argsort(losses.detach().numpy())[:3].copy())


def ranked(losses: Tensor) -> list[int]:
    return sorted(range(len(losses)), key=losses.tolist().__getitem__)


def standard(values: Any) -> Any:
    return (values - values.mean()) / values.std()


def below_median(losses: Tensor) -> Tensor:
    values = losses.detach().numpy()
    return torch.from_numpy(values < np.median(values))


def with_weights(output: Tensor, y: Tensor, weights: Iterable[float]) -> Tensor:
    found = torch.ones(8, dtype=torch.float64)
    for i, one in enumerate(weights):
        found[i] = one
    return (each(output, y) * found).mean()


TARGETS = torch.arange(24) % 4  # three for each sample, from outside


@pytest.mark.parametrize(
    ("loss_of", "placed"),
    [
        (lambda output, y: each(output, y)[smallest(each(output, y))].mean(), True),
        (lambda output, y: each(output, y)[ranked(each(output, y))[:3]].mean(), True),
        (lambda output, y: each(output, y)[below_median(each(output, y))].mean(), True),
        (lambda output, y: F.mse_loss(output[:5], y[:5]), True),
        (lambda output, y: F.mse_loss(output[1:-1], y[1:-1]), True),
        (lambda output, y: F.mse_loss(output[:1], y[:1]), True),
        (lambda output, y: F.mse_loss(output[3], y[3]), True),
        (lambda output, y: (each(output, y) * torch.linspace(0, 1, 8, dtype=torch.float64)).mean(), True),
        (F.mse_loss, False),
        (lambda output, y: each(output, y)[torch.arange(8)].mean(), False),
        (lambda output, y: each(output, y)[ranked(each(output, y))].mean(), False),
        (lambda output, y: each(output, y)[y[:, 0] > 0].sum() / 8, False),
        (lambda output, y: F.mse_loss(output, torch.from_numpy(np.sin(y.numpy()))), False),
        (lambda output, y: with_weights(output, y, y[:, 0].abs().tolist()), False),
        (lambda output, y: F.cross_entropy(output.view(24, 1) * torch.eye(4)[0], TARGETS), False),
        (lambda output, y: F.mse_loss(output + torch.randn(8, 1, dtype=torch.float64), y), False),
        (
            lambda output, y: torch.stack(
                [(i + 1) * F.mse_loss(o, y) for i, (o, y) in enumerate(zip(output, y, strict=True))]
            ).mean(),
            False,
        ),
        (lambda output, y: torch.stack([(i + 1) * F.mse_loss(output[i], y[i]) for i in range(8)]).mean(), False),
    ],
)
def test_a_loss_that_goes_by_where_samples_are_is_found(loss_of: Loss, placed: bool) -> None:
    """Where something else may have a place for each sample (numpy's targets, a list's weights), nothing is said."""
    generator = torch.Generator().manual_seed(0)
    output, y = (torch.randn(8, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    look = ExchangedSamples()
    look.next(object(), 8)
    look.follow([y, output.requires_grad_()], 8)
    look.begin()
    try:
        loss = loss_of(output, y)
    finally:
        look.end()
    assert look.meet(loss, 8) == 0
    assert look.placed is placed


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (standard, True),
        (lambda y: np.abs(y) / np.abs(y).mean(), True),
        (lambda y: np.exp(y) / np.exp(y).sum(), True),
        (lambda y: np.sin(y), False),
        (lambda y: np.where(np.arange(8) < 4, 1.0, -1.0), False),
        (lambda y: np.full(8, 1 / 8), False),
    ],
)
def test_numbers_that_numpy_has_normalised_are_found(made: Callable[[Any], Any], found: bool) -> None:
    output, y = torch.randn(2, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    look = ExchangedSamples()
    look.next(object(), 8)
    look.follow([y, output.requires_grad_()], 8)
    look.begin()
    try:
        (output.sum(1) * torch.from_numpy(made(y[:, 0].numpy()))).mean()
    finally:
        look.end()
    assert look.normalised is found


@pytest.mark.parametrize(
    ("passes", "placed"),
    [
        (lambda x: [x[:5]], True),
        (lambda x: [x[1:-1]], True),
        (lambda x: [x[smallest(x[:, 0])]], True),
        (lambda x: [x, x + 1], False),
        (lambda x: [x[:5], x[5:]], False),
        (lambda x: list(x.split(1)), False),
        (lambda x: [x[x[:, 0] > 0]], False),
        (lambda x: [x.flip(0)], False),
        (lambda x: [torch.from_numpy(x.numpy()[:5])], False),
    ],
)
def test_models_that_are_given_the_first_of_the_samples_alone_are_found(
    passes: Callable[[Tensor], list[Tensor]], placed: bool
) -> None:
    x = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    look = ExchangedSamples()
    look.next(object(), 8)
    look.follow([x], 8)
    look.begin()
    try:
        given = passes(x)
    finally:
        look.end()
    for one in given:
        look.given([one], 8)
    assert look.next(object(), 8) is placed


CASES: dict[str, tuple[bool, Callable[[nn.Module, Tensor, Tensor], Tensor]]] = {
    "ranked by numpy": (True, lambda model, x, y: (some := each(model(x), y))[smallest(some)].mean()),
    "first outputs": (True, lambda model, x, y: F.mse_loss(model(x)[:3], y[:3])),
    "first inputs": (True, lambda model, x, y: F.mse_loss(model(x[:3]), y[:3])),
    "normalised by numpy": (
        True,
        lambda model, x, y: (model(x)[:, 0] * torch.from_numpy(standard(y[:, 0].numpy()))).mean(),
    ),
    "halves": (False, lambda model, x, y: (each(model(x[:2]), y[:2]).sum() + each(model(x[2:]), y[2:]).sum()) / len(x)),
}


def trained(loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> tuple[list[float], list[str]]:
    """Weights after an epoch, and what was told."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    x = torch.randn(22, 5, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x[:, :3] * 2 + 1), batch_size=8)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model, optimizer, loader = hocket.distribute(model, torch.optim.SGD(model.parameters(), 0.05), loader)
        for inputs, target in loader:
            with torch.no_grad():
                model(inputs[:2])  # to show some
            optimizer.zero_grad()
            loss_of(model, inputs, target).backward()
            optimizer.step()
    return [v for p in model.parameters() for v in p.detach().flatten().tolist()], [str(one.message) for one in told]


def all_trained() -> dict[str, Any]:
    return {name: trained(loss_of) for name, (_, loss_of) in CASES.items()}


def test_what_goes_by_places_is_told_once_on_one_rank() -> None:
    alone = all_trained()
    for rank, found in enumerate(run_ranks(all_trained, 2, timeout_s=90)):
        for name, (placed, _) in CASES.items():
            weights, told = found[name]
            assert alone[name][1] == [], name
            assert ["loop chooses or weighs" in one or "has normalised them" in one for one in told] == [True] * (
                placed and rank == 0
            ), name
            assert placed or weights == pytest.approx(alone[name][0], rel=1e-9), name
