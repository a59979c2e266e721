"""What torch.func computes of a model of distribute: derivatives of outputs, each sample's gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks

KINDS = "outputs", "jacobian", "laplacian", "forward derivative", "gradients of samples"


def loss_of(model: nn.Module, x: Tensor, y: Tensor, kind: str) -> Tensor:
    if kind == "outputs":
        return cross_entropy(vmap(model)(x), y)
    if kind == "forward derivative":
        output, tangent = jvp(model, (x,), (torch.ones_like(x),))
        return cross_entropy(output, y) + tangent.square().sum(1).mean()
    if kind == "jacobian":
        return cross_entropy(model(x), y) + vmap(jacrev(model))(x).square().sum((1, 2)).mean()
    second = vmap(hessian(lambda one: model(one).sum()))(x).diagonal(dim1=1, dim2=2)
    return cross_entropy(model(x), y) + second.sum(1).square().mean()


def clipped(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Set the mean of each sample's gradients, each at most of norm 1 (Abadi et al. 2016)."""
    parameters = {name: one.detach() for name, one in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    each = vmap(grad(loss), (None, 0, 0))(parameters, x, y)
    norms = torch.stack([one.flatten(1).square().sum(1) for one in each.values()]).sum(0).sqrt()
    for name, one in model.named_parameters():
        mine = torch.einsum("i,i...->...", (1 / norms).clamp(max=1), each[name])
        one.grad = hocket.total(mine) / hocket.total(len(x))


def trained(kind: str, *, distributed: bool = True) -> list[float]:
    """Train on batches that ranks share unequally; return sums of the weights."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(29, 6, generator=draw).double(), torch.randint(0, 3, (29,), generator=draw)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=6)
    if distributed:
        model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        if kind == KINDS[-1]:
            clipped(model, x, y)
        else:
            loss_of(model, x, y, kind).backward()
        optimizer.step()
    return [float(one.detach().pow(3).sum()) for one in model.parameters()]


def all_kinds() -> list[list[float]]:
    return [trained(kind) for kind in KINDS]


def test_the_weights_are_those_of_one_process() -> None:
    for rank in run_ranks(all_kinds, 2, timeout_s=200):
        for kind, mine in zip(KINDS, rank, strict=True):
            assert mine == pytest.approx(trained(kind, distributed=False), rel=1e-9), kind
