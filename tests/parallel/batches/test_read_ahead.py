"""Who takes the next batch of a loader before the last is used, or goes on with batches of one that has ended."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks

from ..programs import arrays

Batches = Callable[[Any], Iterator[Any]]


def one_ahead(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    following = next(batches, None)
    while following is not None:
        batch, following = following, next(batches, None)
        yield batch


def normalised_ahead(loader: Any) -> Iterator[Any]:
    """As the prefetchers of many examples: what is given to the model is not what the loader gave."""
    return one_ahead((x.sub(0.1).div(1.3), y) for x, y in loader)


def again_and_again(loader: Any) -> Iterator[Any]:
    return itertools.islice(itertools.cycle(loader), 7)


def the_first_left_out(loader: Any) -> Iterator[Any]:
    """Reads nothing ahead."""
    return ((x.sub(0.1), y) for i, (x, y) in enumerate(loader) if i)


def trained(batches: Batches, size: int) -> tuple[list[float], list[Any]]:
    """Two epochs, whose last batches are of `size % 8` samples."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    x = torch.randn(size, 4, dtype=torch.float64)
    loader: Any = DataLoader(TensorDataset(x, torch.arange(size) % 2), batch_size=8)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    losses = []
    for _ in range(2):
        for inputs, labels in batches(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(hocket.average(loss.item()))
    return losses, arrays(model.parameters())


CASES = list(itertools.product((one_ahead, normalised_ahead, again_and_again, the_first_left_out), (25, 27)))


def all_cases() -> list[tuple[list[float], list[Any]]]:
    return [trained(batches, size) for batches, size in CASES]


def test_a_loss_is_of_the_batch_that_was_used() -> None:
    (alone,) = run_ranks(all_cases, 1)
    for rank in run_ranks(all_cases, 2, timeout_s=60):
        for case, mine, expected in zip(CASES, rank, alone, strict=True):
            assert mine[0] == pytest.approx(expected[0], rel=1e-11), case
            for ours, theirs in zip(mine[1], expected[1], strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12, err_msg=str(case))
