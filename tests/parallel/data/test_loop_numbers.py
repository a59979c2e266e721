"""Random numbers that a loop draws for its samples: told of, whichever library draws them; those of passes are not."""

import os
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks

NUMPY, RANDOM, TORCH = np.random.default_rng(0), random.Random(0), torch.Generator()


def by_numpy(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x + torch.from_numpy(np.random.randn(*x.shape))), y)


def by_python(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x * torch.tensor([[float(random.random() < 0.5)] for _ in x])), y)


def after_the_model(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return (F.mse_loss(model(x), y, reduction="none") * (torch.rand(len(x), 1) < 0.5)).mean()


def by_one_of_numpy(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x + torch.from_numpy(NUMPY.standard_normal(x.shape))), y)


def by_one_of_python(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x * torch.tensor([[RANDOM.random()] for _ in x])), y)


def by_one_of_torch(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x + torch.randn(x.shape, generator=TORCH)), y)


def one_by_own(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x * RANDOM.random() * float(torch.rand((), generator=TORCH)) * NUMPY.random()), y)


def one_for_the_batch(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x * np.random.rand()), y * random.random())


class Unbound:
    """As a proxy of what is not there yet."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("working outside of a context")


UNBOUND = Unbound()


def beside_a_proxy(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y if UNBOUND is not None else x)


def two_passes(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y) + F.mse_loss(model(x), y)


def pass_without_gradients(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(x)
    return F.mse_loss(model(x), target)


def told(loss_of: Callable[[Any, Tensor, Tensor], Tensor], apart: bool = False) -> list[str]:
    TORCH.manual_seed(5 + apart * int(os.environ["RANK"]))
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    made = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double()
    data = TensorDataset(torch.randn(32, 3).double(), torch.randn(32, 3).double())
    model, optimizer, loader = hocket.distribute(
        made, torch.optim.SGD(made.parameters(), lr=0.1), DataLoader(data, batch_size=16)
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
    return [str(one.message) for one in said if "the loop draws" in str(one.message)]


@pytest.mark.parametrize(
    ("loss_of", "whose"), [(by_numpy, " of numpy"), (by_python, " of Python"), (after_the_model, "")]
)
def test_numbers_for_samples_are_told_of(loss_of: Callable[[Any, Tensor, Tensor], Tensor], whose: str) -> None:
    first, other = run_ranks(told, 2, loss_of)
    assert len(first) == 1
    assert f"the loop draws random numbers{whose} for a batch" in first[0]
    assert other == []


@pytest.mark.parametrize("loss_of", [by_one_of_numpy, by_one_of_python, by_one_of_torch])
def test_those_of_a_generator_of_the_program_are_told_of(loss_of: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    first, other = run_ranks(told, 2, loss_of)
    assert len(first) == 1
    assert "the loop draws random numbers from a generator of its own for a batch" in first[0]
    assert other == []


def test_those_of_a_generator_that_each_rank_seeds_are_not() -> None:
    assert run_ranks(told, 2, by_one_of_torch, True) == [[], []]


@pytest.mark.parametrize("loss_of", [one_for_the_batch, one_by_own, beside_a_proxy, two_passes, pass_without_gradients])
def test_numbers_for_a_batch_and_those_of_passes_are_not(loss_of: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    assert run_ranks(told, 2, loss_of) == [[], []]
