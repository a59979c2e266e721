"""Tensors that a loop trains besides its model; modules that it calls besides are in test_apart.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks

Step = Callable[[Any, Any, Tensor, Tensor, Tensor, Any], None]


def tasks(model: Any, optimizer: Any, x: Tensor, y: Tensor, own: Tensor, others: Any) -> None:
    """Two losses are weighed by their learned uncertainties."""
    output = model(x)
    losses = torch.stack([F.mse_loss(output, y), F.l1_loss(output, y)])
    ((losses * (-own).exp()).sum() + own.sum()).backward()


def temperature(model: Any, optimizer: Any, x: Tensor, y: Tensor, own: Tensor, others: Any) -> None:
    F.cross_entropy(model(x) * own[0].exp(), y.argmax(1)).backward()


def multiplier(model: Any, optimizer: Any, x: Tensor, y: Tensor, own: Tensor, others: Any) -> None:
    """A loss of its own trains it, as the entropy's factor in reinforcement learning."""
    output = model(x)
    F.mse_loss(output, y).backward()
    (-(own[1].exp() * (output.detach().square() - 0.5).mean())).backward()


def perturbation(model: Any, optimizer: Any, x: Tensor, y: Tensor, own: Tensor, others: Any) -> None:
    """One for each sample is a rank's own."""
    added = torch.zeros_like(x, requires_grad=True)
    F.mse_loss(model(x + added + 0 * own.sum()), y).backward()


def trained(step: Step, other: type[torch.optim.Optimizer], averages: bool, alone: bool) -> tuple[str, list[float]]:
    """Train for five batches; return what is raised, and the weights and what was trained besides."""
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(23, width, generator=draw, dtype=torch.float64) for width in (4, 3))
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    model: Any = net
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.1)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=5)
    own = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    others = other([own], lr=0.05)
    if not alone:
        model, optimizer, loader = hocket.distribute(net, optimizer, loader)
    try:
        for some, targets in loader:
            optimizer.zero_grad()
            others.zero_grad()
            step(model, optimizer, some, targets, own, others)
            if averages and not alone:
                own.grad = hocket.average(own.grad)
            optimizer.step()
            others.step()
    except RuntimeError as error:
        return str(error), []
    return "", [*net.weight.flatten().tolist(), *own.tolist()]


def all_trained(averages: bool, alone: bool) -> list[tuple[str, list[float]]]:
    steps = (tasks, temperature, multiplier, perturbation)
    return [trained(one, kind, averages, alone) for one in steps for kind in (torch.optim.SGD, torch.optim.Adam)]


def test_what_is_trained_besides_the_model_by_each_rank_for_itself_is_refused() -> None:
    """Nobody averages its gradient: 1e-4 to 3e-3 off after four steps, and silent."""
    for *refused, first, second in run_ranks(all_trained, 2, False, False):
        assert all("trains besides its model" in said for said, _ in refused)
        assert not first[0]
        assert not second[0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_trained_besides_is_that_of_one_process_with_averaged_gradients(ranks: int) -> None:
    alone = all_trained(True, True)
    for found in run_ranks(all_trained, ranks, True, False):
        for (said, mine), (_, theirs) in zip(found, alone, strict=True):
            assert not said
            assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)
