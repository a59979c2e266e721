"""Losses that cache gradients: a hook of a tensor without a graph runs the model and back-propagates."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks


class Cached(nn.Module):
    """In-batch negatives, of embeddings that are computed twice, as sentence-transformers' Cached... losses do it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            found = torch.cat([self.model(part) for part in x.split(2)])
        if not torch.is_grad_enabled():
            return in_batch(found)
        found.requires_grad_()
        loss = in_batch(found)
        loss.backward()
        gradients = found.grad
        loss = loss.detach().requires_grad_()

        def again(factor: Tensor) -> None:
            with torch.enable_grad():
                for part, gradient in zip(x.split(2), gradients.split(2), strict=True):
                    (self.model(part) * gradient * factor).sum().backward()

        loss.register_hook(again)
        return loss


class Steep(nn.Module):
    """Adds to its output how steep it is, by a back-propagation of its own that ends at its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            moved = x.detach().requires_grad_()
            (moved @ self.layer.weight.detach().T).tanh().sum().backward()
        return self.layer(x) * moved.grad.norm(dim=1, keepdim=True)


class Itself(nn.Module):
    """Back-propagates in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layer(x).square().mean()
        if torch.is_grad_enabled():
            loss.backward()
        return loss.detach()


def in_batch(found: Tensor) -> Tensor:
    return nn.functional.cross_entropy(found @ found.T.sin(), torch.arange(len(found)))


def refused(kind: str) -> str:
    model, optimizer, loader = made(nn.Linear(4, 3))
    if kind == "model":
        model, optimizer, loader = hocket.distribute(model, optimizer, loader)
        run: Any = Cached(model)
    else:
        run, optimizer, loader = hocket.distribute(Cached(model), optimizer, loader)
    loss = run(next(iter(loader))[0])
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    return str(error.value)


def made(model: nn.Module) -> tuple[nn.Module, Any, DataLoader]:
    torch.manual_seed(0)
    model = model.double()
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn_like(one))
    x = torch.randn(11, 4, generator=torch.Generator().manual_seed(1)).double()
    return model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(TensorDataset(x), batch_size=4)


def trained(kind: type[nn.Module], distributed: bool) -> list[Tensor]:
    model, optimizer, loader = made(kind())
    if distributed:
        model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    for (x,) in loader:
        optimizer.zero_grad()
        if (output := model(x)).requires_grad:
            output.square().mean().backward()
        optimizer.step()
    return [one.detach().clone() for one in model.parameters()]


@pytest.mark.parametrize("kind", ["model", "loss"])
def test_a_loss_whose_hook_runs_the_model_is_refused(kind: str) -> None:
    assert all("gradient caching" in error for error in run_ranks(refused, 2, kind))


@pytest.mark.parametrize("kind", [Steep, Itself])
def test_a_model_may_back_propagate_in_its_own_forward(kind: type[nn.Module]) -> None:
    wanted = trained(kind, False)
    for found in run_ranks(trained, 2, kind, True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def of_all_ranks(mine: Tensor) -> Tensor:
    """Return the outputs of all ranks, of which this rank's own have their graph."""
    if not dist.is_initialized():
        return mine
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine.detach())
    found[dist.get_rank()] = mine
    return torch.cat(found)


def caching(kind: str, distributed: bool) -> tuple[list[Tensor], str]:
    """Train a step by gradients that the loop has cached; return weights, and what is told."""
    model, optimizer, loader = made(nn.Linear(4, 3))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if distributed:
            reduction: Any = "mean" if kind == "mean" else "sum"
            model, optimizer, loader = hocket.distribute(model, optimizer, loader, loss_reduction=reduction)
        batches = iter(loader)
        (x,) = next(batches)
        with torch.no_grad():
            cut = model(x)
        cut.requires_grad_()
        if kind == "alone":
            loss = cut.sin().square().sum() / 10
        else:
            loss = in_batch(of_all_ranks(cut) if kind == "gathered" else cut)
        if kind == "asked":
            gradients = torch.autograd.grad(loss, cut)[0]
        else:
            loss.backward()
            gradients = cut.grad
        optimizer.zero_grad()
        model(x).backward(gradients)
        optimizer.step()
    said = " ".join(str(one.message) for one in told if "rank" in str(one.message))
    return [one.detach().clone() for one in model.parameters()], said


@pytest.mark.parametrize("kind", ["sum", "mean", "asked"])
def test_samples_that_meet_in_a_loss_whose_gradient_a_loop_caches_are_told_of(kind: str) -> None:
    """Each rank compares its own: 9e-3 to 7.8e-2 off, and silent."""
    assert "gradient caching" in run_ranks(caching, 2, kind, True)[0][1]


@pytest.mark.parametrize("kind", ["gathered", "alone"])
def test_a_loop_may_cache_gradients_of_samples_of_all_ranks(kind: str) -> None:
    wanted, _ = caching(kind, False)
    for found, said in run_ranks(caching, 2, kind, True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert not said
