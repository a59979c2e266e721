"""What a program has imported by name from torch.autograd tells as torch.autograd's own attribute does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import backward, grad  # before hocket follows them
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks

Step = Callable[[Any, Tensor, Tensor], None]


def trained(step: Step) -> tuple[str, list[str], list[float]]:
    """Train; return why it was refused, warnings, and what the weights are."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=draw, dtype=torch.float64)
    loader: Any = DataLoader(TensorDataset(x, torch.randint(3, (16,), generator=draw)), batch_size=4)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    plain = model
    model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for x, y in loader:
                optimizer.zero_grad()
                step(model, x, y)
                optimizer.step()
        except RuntimeError as error:
            return str(error), [], []
    return "", [str(one.message) for one in caught], [float(one.detach().sum()) for one in plain.parameters()]


def by_gradients(model: Any, x: Tensor, y: Tensor) -> None:
    gradients = grad(functional.cross_entropy(model(x), y), list(model.parameters()))
    for one, gradient in zip(model.parameters(), gradients, strict=True):
        one.grad = gradient


def with_a_penalty(model: Any, x: Tensor, y: Tensor) -> None:
    x = x.clone().requires_grad_()
    output = model(x)
    (slope,) = grad(output.sum(), x, create_graph=True)
    (functional.cross_entropy(output, y) + (slope.norm(dim=1) - 1).square().mean()).backward()


def with_one_step_for_all(model: Any, x: Tensor, y: Tensor) -> None:
    """As virtual adversarial training, but normalised over a rank's samples."""
    moved = (1e-2 * x.cos()).requires_grad_()
    (slope,) = grad(functional.cross_entropy(model(x + moved), y, reduction="sum"), moved)
    functional.cross_entropy(model(x + slope / slope.norm()), y).backward()


def counted(model: Any, x: Tensor, y: Tensor) -> None:
    backward(functional.cross_entropy(model(x), torch.where(x[:, 0] > 0.5, -100, y)))


def everything() -> list[tuple[str, list[str], list[float]]]:
    return [trained(one) for one in (by_gradients, with_one_step_for_all, with_a_penalty, counted)]


def test_imported_functions_are_followed() -> None:
    (alone,) = run_ranks(everything, 1, timeout_s=60)
    first, second = run_ranks(everything, 2, timeout_s=100)
    assert "without averaging" in first[0][0]
    assert "depends on other samples" in first[1][0]
    assert [one[0] for one in first] == [one[0] for one in second]
    for (_, _, right), (refused, told, weights) in zip(alone[2:], first[2:], strict=True):
        assert (refused, told) == ("", [])
        torch.testing.assert_close(torch.tensor(weights), torch.tensor(right), rtol=1e-10, atol=1e-10)
