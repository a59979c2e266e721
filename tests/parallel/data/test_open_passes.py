"""A pass of which no loss is computed, or whose gradients go through the model alone, leaves the next loss as it is."""

from __future__ import annotations

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

from ..programs import arrays

Result = tuple[list[float], list[Any]]


def data() -> DataLoader[Any]:
    """Batches of eight samples, and a last one of three or of one."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(19, 4, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.randint(-1, 2, (19,), generator=generator)), batch_size=8)


def net(outputs: int = 2, inputs: int = 4) -> nn.Module:
    torch.manual_seed(outputs)
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def trained(step: Callable[..., Tensor], *, together: Callable[[Any, Any], Any] = lambda model, x: None) -> Result:
    """Two epochs of `step`, each with a look of the program at what the model gives then."""
    model: Any = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = hocket.distribute(model, optimizer, data())
    losses = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = step(model, x, y)
            seen = together(model, x)
            loss.backward()
            optimizer.step()
            losses.append(hocket.average(loss).item())
            shown = model(x)  # without no_grad
            assert shown.requires_grad
        del seen
    return losses, arrays(model.parameters())


def of_what_counts(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, ignore_index=-1)


def penalty(model: Any, x: Tensor) -> Tensor:
    inputs = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def over_what_counts() -> Result:
    return trained(of_what_counts)


def with_a_penalty() -> Result:
    return trained(lambda model, x, y: F.cross_entropy(model(x), y.abs()) + penalty(model, x))


def looked_at_before_the_backward_pass() -> Result:
    return trained(of_what_counts, together=lambda model, x: model(x.flip(1)))


def of_two_batches() -> Result:
    """Some losses are of two batches, and what was looked at between them is of none."""
    model: Any = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = hocket.distribute(model, optimizer, data())
    for _ in range(2):
        total: Any = 0.0
        for i, (x, y) in enumerate(loader):
            total = total + F.cross_entropy(model(x), y.abs())
            shown = model(x)
            if i:
                optimizer.zero_grad()
                total.backward()
                optimizer.step()
                total = 0.0
        del shown
    return [], arrays(model.parameters())


def adversarial() -> Result:
    """The generator's gradients go through a critic that is frozen meanwhile, as in WGAN-GP."""
    generator, critic = net(4), net(1)
    ours, _, loader = hocket.distribute(generator, None, data())
    theirs, _, _ = hocket.distribute(critic, None)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (generator, critic)]
    losses = []
    for _ in range(2):
        for x, _ in loader:
            loss = theirs(ours(x.sin()).detach()).mean() - theirs(x).mean() + penalty(theirs, x)
            optimizers[1].zero_grad()
            loss.backward()
            optimizers[1].step()
            losses.append(hocket.average(loss).item())
            critic.requires_grad_(False)
            loss = -theirs(ours(x.sin())).mean()
            optimizers[0].zero_grad()
            loss.backward()
            optimizers[0].step()
            critic.requires_grad_(True)
            losses.append(hocket.average(loss).item())
    return losses, arrays([*generator.parameters(), *critic.parameters()])


def two_models() -> Result:
    """Both models have made other passes since the losses were computed."""
    one, two = net(), net(3)
    first, _, loader = hocket.distribute(one, None, data())
    second, _, _ = hocket.distribute(two, None)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (one, two)]
    losses = []
    for _ in range(2):
        for x, y in loader:
            mine = [of_what_counts(first, x, y), of_what_counts(second, x, -y)]
            shown = [first(x.flip(1)), second(x.flip(1))]
            for loss, optimizer in zip(mine, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(hocket.average(loss).item())
        del shown
    return losses, arrays([*one.parameters(), *two.parameters()])


PROGRAMS = {
    one.__name__: one
    for one in (
        over_what_counts,
        with_a_penalty,
        looked_at_before_the_backward_pass,
        of_two_batches,
        adversarial,
        two_models,
    )
}


def all_of_them() -> dict[str, Result]:
    return {name: program() for name, program in PROGRAMS.items()}


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.long)])
def test_passes_of_no_loss_leave_the_next_one_as_it_is(n: int) -> None:
    (alone,) = run_ranks(all_of_them, 1)
    for rank in run_ranks(all_of_them, n, timeout_s=60):
        for name, (losses, weights) in alone.items():
            assert rank[name][0] == pytest.approx(losses, rel=1e-11), name
            for ours, theirs in zip(rank[name][1], weights, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12, err_msg=name)
