"""A loop that writes parts of samples into others is told of; one that writes what is no sample is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks


def from_others(x: Tensor) -> Tensor:
    """As of cutmix, which takes a rectangle of each image from another one."""
    others = x.flip(0)
    x = x.clone()
    x[:, :, 2:5, 2:5] = others[:, :, 2:5, 2:5]
    return x


def from_none(x: Tensor) -> Tensor:
    """As of cutout."""
    x[:, :, 2:5, 2:5] = 0.5
    x[:, 0] *= 2
    return x


def from_itself(x: Tensor) -> Tensor:
    x[..., 4:] = x[..., :4].clone()
    return x


def told(change: Callable[[Tensor], Tensor]) -> list[bool]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 3, 8, 8).double(), torch.randint(4, (16,)))
    made = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 4)).double()
    model, optimizer, loader = hocket.distribute(
        made, torch.optim.SGD(made.parameters(), lr=0.1), DataLoader(data, batch_size=8)
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, y in loader:
            loss = F.cross_entropy(model(change(x)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return ["puts each sample beside another" in str(one.message) for one in said]


def cases() -> list[list[bool]]:
    return [told(change) for change in (from_others, from_none, from_itself)]


def test_parts_of_samples_that_come_from_others_are_told_of() -> None:
    others, none, itself = run_ranks(cases, 2)[0]
    assert others
    assert all(others)
    assert (none, itself) == ([], [])
