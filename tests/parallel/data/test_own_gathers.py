"""What a program gathers itself has a row of a rank that has no samples, and the program is told."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks


def keys(samples: int, gathers: str) -> list[str]:
    """What is said while a loop keeps the features of all ranks in a queue, as MoCo does."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(samples, 4), torch.randn(samples, 2))
    made = nn.Linear(4, 2)
    model, optimizer, loader = hocket.distribute(
        made, torch.optim.SGD(made.parameters(), lr=0.1), DataLoader(data, batch_size=4)
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, y in loader:
            output = model(x)
            if gathers == "gather":
                rows = [torch.zeros(1, 2) for _ in range(dist.get_world_size())]
                dist.all_gather(rows, output.detach()[:1].contiguous())
            elif gathers == "objects":
                dist.all_gather_object([None] * dist.get_world_size(), float(output.sum()))
            else:
                dist.all_reduce(torch.ones(1))
            optimizer.zero_grad()
            F.mse_loss(output, y).backward()
            optimizer.step()
    return [str(one.message) for one in said if "stands in for" in str(one.message)]


def cases() -> list[list[str]]:
    return [keys(*one) for one in ((6, "gather"), (5, "sum"), (5, "gather"), (5, "objects"))]


def test_who_gathers_the_row_of_a_rank_without_samples_is_told_once() -> None:
    first, second = run_ranks(cases, 2)
    assert first == [[]] * 4
    assert [len(one) for one in second] == [0, 0, 1, 0]
    assert "the program calls all_gather in a batch of 1 sample, of which this rank has none" in second[2][0]
