"""Models that are made ready apart and share layers: each gradient is averaged, and weighed, once."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks

from ..under_way import hidden_until_waited_for

WIDTH = 32


@functools.cache
def results(n: int) -> list[dict[str, list[float]]]:
    return run_ranks(all_ways, n)


def all_ways() -> dict[str, list[float]]:
    with hidden_until_waited_for():
        return {way: trained(way) for way in WAYS}


def trained(way: str) -> list[float]:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    models: list[Any] = [nn.Sequential(body, nn.Linear(WIDTH, 4)).double() for _ in range(2)]
    seen: list[float] = []
    if way == "hooked":
        body[2].bias.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.square().sum())))
    data = TensorDataset(torch.randn(21, 16).double(), torch.randn(21, 4).double())
    optimizers: list[Any] = [torch.optim.SGD(one.parameters(), 0.05) for one in models]
    models[0], optimizers[0], loader = hocket.distribute(models[0], optimizers[0], DataLoader(data, 7))
    models[1], optimizers[1], _ = hocket.distribute(models[1], optimizers[1])
    functions = nn.functional.mse_loss, nn.functional.l1_loss
    for x, y in loader:
        for one in optimizers:
            one.zero_grad()
        if way in ("by turns", "hooked"):
            for model, optimizer, loss in zip(models, optimizers, functions, strict=True):
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
            continue
        first, second = (loss(model(x), y) for model, loss in zip(models, functions, strict=True))
        if way == "summed":
            (first + second).backward()
        else:
            second.backward()
            first.backward()
        for one in optimizers:
            one.step()
    return [float(p.detach().square().sum()) for model in models for p in model.parameters()] + seen


WAYS = ["by turns", "hooked", "one after another", "summed"]


@pytest.mark.parametrize("way", WAYS)
def test_as_on_one_rank(way: str) -> None:
    (alone,) = results(1)
    for rank in results(2):
        assert rank[way] == pytest.approx(alone[way], rel=1e-11)
