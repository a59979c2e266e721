"""What hocket.distribute returns has the model's own methods, also where torch has some of that name."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks


class Tuned(nn.Module):
    """Names its head as its parameters, keeps batch norm as it is, and moves a table of its own."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.table = [torch.ones(1)]
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.body(x))) * self.table[0]
        return out

    def parameters(self, recurse: bool = True) -> Any:
        return self.head.parameters(recurse)

    def train(self, mode: bool = True) -> Tuned:
        super().train(mode)
        self.norm.eval()
        return self

    def double(self) -> Tuned:
        self.table = [one.double() for one in self.table]
        return super().double()


def trained() -> list[float]:
    """Return the norms by which gradients are clipped, losses and sums of the weights."""
    model: Any = Tuned()
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}, {"params": list(model.body.parameters())}], 0.1)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(22, 4, generator=draw, dtype=torch.float64)
    loader: Any = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)
    if torch.distributed.is_initialized():
        model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    found = []
    assert model.double() is model
    for x, y in loader:
        assert model.train() is model
        assert model.training
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        found.append(float(hocket.average(loss)))
        assert not model.eval().training
    return found + [float(one.detach().sum()) for one in named.values()]


def test_a_model_s_own_parameters_modes_and_moves_are_taken() -> None:
    """The norm of all parameters was clipped, and batch norm in training was told of only later."""
    alone = trained()
    for found in run_ranks(trained, 2, timeout_s=100):
        assert found == pytest.approx(alone, rel=1e-9)  # sums in another order


def begun() -> float:
    """Return the sum of a weight with which a Trainer begins on ranks that are seeded apart."""
    model = Tuned(seed=torch.distributed.get_rank())
    hocket.Trainer(model, mse_loss, torch.optim.SGD(nn.Module.parameters(model), 0.1))
    return float(model.body.weight.detach().sum())


def test_a_trainer_begins_with_all_of_rank_0_s_parameters() -> None:
    """Those that the model does not name stayed as each rank had drawn them."""
    one, other = run_ranks(begun, 2, timeout_s=100)
    assert one == other


class Named(Tuned):
    """Names its head alone."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.head.named_parameters(*args, **kwargs)


def distributed() -> float:
    """Return the sum of a weight that the model does not name, on ranks that are seeded apart."""
    model = Named(seed=torch.distributed.get_rank())
    hocket.distribute(model, torch.optim.SGD(model.head.parameters(), 0.1))
    return float(model.body.weight.detach().sum())


def test_a_distributed_model_begins_with_all_of_rank_0_s_parameters() -> None:
    one, other = run_ranks(distributed, 2, timeout_s=100)
    assert one == other


class Contrasts(nn.Module):
    """Has a `train` that gives a loss, as of the forward-forward algorithm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def train(self, good: Any = True, bad: Any = None) -> Any:
        return super().train(good) if bad is None else (self(bad) - self(good)).mean()


def test_a_method_of_torch_s_name_may_be_another() -> None:
    torch.manual_seed(0)
    model, _, _ = hocket.distribute(Contrasts())
    x = torch.randn(5, 4)
    own: Any = model.module
    torch.testing.assert_close(cast(Any, model).train(x, x * 2), own.train(x, x * 2))
    assert model.train() is model
