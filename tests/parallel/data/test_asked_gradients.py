"""What `torch.autograd.grad` gives for parameters is not weighed, also where a part of back-propagation calls it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks

from ..programs import arrays

Result = tuple[list[float], list[Any]]


class Adjoint(torch.autograd.Function):
    """Euler's steps of an ODE, gone through backwards one by one."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, z: Tensor, *_: Tensor) -> Tensor:
        states = [z]
        with torch.no_grad():
            for _ in range(3):
                states.append(states[-1] + field(states[-1]) / 3)
        ctx.field = field
        ctx.save_for_backward(*states)
        return states[-1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        parameters = list(ctx.field.parameters())
        sums = [torch.zeros_like(one) for one in parameters]
        for state in reversed(ctx.saved_tensors[:-1]):
            with torch.enable_grad():
                z = state.detach().requires_grad_()
                made = torch.autograd.grad(z + ctx.field(z) / 3, [z, *parameters], gradient)
            gradient, sums = made[0], [a + b for a, b in zip(sums, made[1:], strict=True)]
        return None, gradient, *sums


class Ode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.field = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.last = nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Adjoint.apply(self.field, x, *self.field.parameters()))


def of_an_adjoint(model: Any, net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def of_masked(model: Any, net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.where(x[:, 0] > 0.5, -100, y))


def of_meta_learning(model: Any, net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Each sample is a task: one inner step by it, in `no_sync`, then its loss with what that gave."""
    names, parameters = zip(*net.named_parameters(), strict=True)
    losses = []
    with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
        for row, label in zip(x, y, strict=True):
            inner = F.cross_entropy(net(row[None]), label[None])
            made = torch.autograd.grad(inner, parameters, create_graph=True)
            fast = {name: one - 0.3 * by for name, one, by in zip(names, parameters, made, strict=True)}
            losses.append(F.cross_entropy(functional_call(net, fast, (row[None].flip(1),)), label[None]))
        return torch.stack(losses).mean()


def of_an_edge(model: Any, net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A penalty of what each sample's output changes the loss by, asked for by its edge in the graph."""
    outputs = model(x)
    losses = F.cross_entropy(outputs, y, reduction="none")
    (slopes,) = torch.autograd.grad(losses.sum(), [get_gradient_edge(outputs)], create_graph=True)
    return losses.mean() + slopes.square().sum(1).mean()


def trained(loss_of: Callable[..., Tensor], alone: bool, samples: int) -> Result:
    net: Any = Ode() if loss_of is not of_meta_learning else nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    torch.manual_seed(1)
    for one in net.double().parameters():
        nn.init.normal_(one, std=0.5)
    x = torch.randn(samples, 4, dtype=torch.float64)
    loader: Any = DataLoader(TensorDataset(x, torch.arange(samples) % 2), batch_size=8)
    model, optimizer = net, torch.optim.SGD(net.parameters(), lr=0.3)
    if not alone:
        model, optimizer, loader = hocket.distribute(net, optimizer, loader)
    losses = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model, net, x, y)
            loss.backward()
            optimizer.step()
            losses.append((loss if alone else hocket.average(loss)).item())
    return losses, arrays(net.parameters())


@pytest.mark.parametrize("samples", [17, 19])  # one and three in the last batch
@pytest.mark.parametrize("loss_of", [of_an_adjoint, of_masked, of_meta_learning, of_an_edge])
def test_gradients_that_are_asked_for_are_not_weighed(loss_of: Callable[..., Tensor], samples: int) -> None:
    losses, ends = trained(loss_of, True, samples)
    for seen, weights in run_ranks(trained, 2, loss_of, False, samples):
        np.testing.assert_allclose(seen, losses, rtol=1e-12)
        for mine, theirs in zip(weights, ends, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-13)


def said_of_edges() -> list[str]:
    """Return what is said of a back-propagation from an edge, and of gradients of an edge that ends at a parameter."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    net = nn.Linear(4, 2)
    model, _, loader = hocket.distribute(net, torch.optim.SGD(net.parameters(), 0.1), DataLoader(TensorDataset(x), 4))
    (batch,) = next(iter(loader))
    loss = model(batch).square().mean()
    edges: Any = get_gradient_edge(loss), get_gradient_edge(net.weight)
    said = []
    for call in (lambda: torch.autograd.backward(edges[0]), lambda: torch.autograd.grad(loss, edges[1])):
        with pytest.raises(RuntimeError) as error:
            call()
        said.append(str(error.value))
    return said


def test_gradients_of_edges_are_those_of_tensors_or_refused() -> None:
    """They ended in `'GradientEdge' object has no attribute 'numel'`."""
    for backward, asked in run_ranks(said_of_edges, 2):
        assert "give it the loss itself" in backward
        assert "without averaging them over ranks" in asked


class Sine(nn.Module):
    """Its derivative's derivative is made of operators that other losses have, too."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


PENALTIES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sum": (lambda slopes: slopes.pow(2).sum(), "is a sum over samples"),
    "sum of sums": (lambda slopes: slopes.abs().sum(1).sum(), "is a sum over samples"),
    "norm": (lambda slopes: slopes.norm() ** 2, "is a sum over samples"),
    "small": (lambda slopes: 0.01 * slopes.norm() ** 2, "a term of the loss is a sum over this rank's"),
    "mean": (lambda slopes: slopes.pow(2).mean(), ""),
    "of norms": (lambda slopes: (slopes.norm(dim=1) - 1).square().mean(), ""),
    "divided": (lambda slopes: slopes.pow(2).sum() / len(slopes), ""),
}


def penalised(kind: str, activation: type[nn.Module], alone: bool) -> tuple[str, list[float]]:
    """Train with a penalty of the outputs' slopes; return what is said, and a sum of the weights in the end."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 2)).double()
    x = torch.randn(16, 4, dtype=torch.float64)
    loader: Any = DataLoader(TensorDataset(x, x[:, :2]), batch_size=8)
    model, optimizer = net, torch.optim.SGD(net.parameters(), lr=0.05)
    if not alone:
        model, optimizer, loader = hocket.distribute(net, optimizer, loader)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            for inputs, target in loader:
                given = inputs.clone().requires_grad_()
                outputs = model(given)
                (slopes,) = torch.autograd.grad(outputs.sum(), given, create_graph=True)
                optimizer.zero_grad()
                (F.mse_loss(outputs, target) + PENALTIES[kind][0](slopes)).backward()
                optimizer.step()
        except RuntimeError as error:
            return str(error), []
    return "".join(str(one.message) for one in warned), [one.sum().item() for one in net.parameters()]


@pytest.mark.parametrize("activation", [nn.Tanh, Sine])
@pytest.mark.parametrize("kind", PENALTIES)
def test_a_sum_over_samples_of_their_gradients_is_one_as_of_their_losses(
    kind: str, activation: type[nn.Module]
) -> None:
    """It was 0.2 to 150 off, and silent: it comes from within the model, and not from its outputs."""
    said = PENALTIES[kind][1]
    ranks = run_ranks(penalised, 2, kind, activation, False)
    if said:
        assert said in ranks[0][0]
    else:
        for told, weights in ranks:
            assert not told
            np.testing.assert_allclose(weights, penalised(kind, activation, True)[1], rtol=1e-12)
