"""A back-propagation of several losses, or of a vector of them, is judged as one of their sum."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks


def losses(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def spread(each: Tensor, by: float) -> None:
    each.backward(torch.full_like(each, by))


ROOTS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "vector": lambda output, target: spread(losses(output, target), 1 / len(output)),
    "elements": lambda output, _: spread(output.square(), 1 / output.numel()),
    "slopes": lambda output, _: output.backward(2 * output.detach() / output.numel()),
    "two": lambda output, target: torch.autograd.backward([output.square().mean(), losses(output, target).mean()]),
    "one by one": lambda output, target: torch.autograd.backward([*(losses(output, target) / len(output))]),
    "added": lambda output, target: sum(losses(output, target) / len(output)).backward(),  # type: ignore[union-attr]
}
REFUSED: dict[str, tuple[str, Callable[[Tensor, Tensor], None]]] = {
    "ones": ("is a sum over samples", lambda output, target: spread(losses(output, target), 1.0)),
    "masked": (
        "means over different things",
        lambda output, target: torch.autograd.backward(
            [output.square().mean(), F.cross_entropy(output, target.where(target > 0, -100))]
        ),
    ),
}


def fit(name: str) -> list[float] | str:
    """Return what an epoch leaves, or what it ends in."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(14, 6, generator=draw, dtype=torch.float64)
    y = torch.arange(14) % 3
    torch.manual_seed(0)
    model: Any = nn.Linear(6, 3).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=7)
    with warnings.catch_warnings(action="error"):
        model, optimizer, loader = hocket.distribute(model, optimizer, loader)
        try:
            for one, target in loader:
                optimizer.zero_grad()
                (ROOTS[name] if name in ROOTS else REFUSED[name][1])(model(one), target)
                optimizer.step()
        except RuntimeError as error:
            return str(error)
    return [w for p in model.parameters() for w in p.detach().flatten().tolist()]


@pytest.mark.parametrize("name", ROOTS)
def test_back_propagations_that_are_those_of_a_mean_are_those_of_one_device(name: str) -> None:
    assert run_ranks(fit, 2, name)[0] == pytest.approx(fit(name), rel=1e-9)


@pytest.mark.parametrize("name", REFUSED)
def test_back_propagations_that_are_not_are_refused(name: str) -> None:
    """`losses.backward(torch.ones_like(losses))` was 6e-2 off, two losses of which one is masked 3e-3, and silent."""
    for said in run_ranks(fit, 2, name):
        assert isinstance(said, str)
        assert REFUSED[name][0] in said
