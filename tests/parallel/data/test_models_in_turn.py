"""Models that are trained one after another in one process, and modules that hold a model and keep logs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks


def data() -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(45, 6, generator=random, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (45,), generator=random))


def parts(seed: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return hocket.distribute(model, torch.optim.SGD(model.parameters(), 0.2), DataLoader(data(), batch_size=8))


def folds() -> list[float]:
    """Losses of three models, all of which are kept, where two batches make a step."""
    kept, losses = [], []
    for fold in range(3):
        model, optimizer, loader = parts(fold)
        for number, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y) / 2
            loss.backward()
            losses.append(float(hocket.average(loss.detach())))
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        kept.append((model, optimizer, loader))
    return losses


def test_a_model_that_has_been_trained_before_does_not_get_into_the_way_of_the_next() -> None:
    (alone,) = run_ranks(folds, 1, timeout_s=120)
    for losses in run_ranks(folds, 2, timeout_s=120):
        assert losses == pytest.approx(alone, rel=1e-9)


class System(nn.Module):
    """The model and its loss, as Lightning's modules have them, with what one keeps for a log, or for the next loss."""

    def __init__(self, model: nn.Module, kept: str) -> None:
        super().__init__()
        self.model, self.kept = model, kept
        self.number, self.outputs, self.center = torch.zeros(()), torch.zeros(()), torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(x)
        if self.kept == "outputs":
            self.outputs = out.detach()
        return out

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self(x)
        loss = nn.functional.cross_entropy(out, y)
        if self.kept == "scale":
            loss = loss / (1 + self.number)
        if self.kept in ("loss", "scale"):
            self.number = loss.detach()
        if self.kept == "center":
            loss = loss + (out - self.center).square().mean()
            self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
        return loss


class Criterion(nn.Module):
    """A loss beside the model, which keeps its last value."""

    def __init__(self, *, scaled: bool) -> None:
        super().__init__()
        self.scaled, self.last = scaled, torch.zeros(())

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(out, y)
        if self.scaled:
            loss = loss / (1 + self.last)
        self.last = loss.detach()
        return loss


def losses_of(kept: str, divided: int) -> list[float] | str:
    model, optimizer, loader = parts(0)
    system, criterion = System(model, kept), Criterion(scaled=kept == "criterion, scaled")
    losses = []
    try:
        for x, y in loader:
            loss = criterion(model(x), y) if "criterion" in kept else system.loss(x, y)
            (loss / divided).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(hocket.average(loss.detach())))
    except RuntimeError as error:
        return str(error)
    return losses


@pytest.mark.parametrize(("kept", "divided"), [("loss", 1), ("loss", 2), ("outputs", 1), ("criterion", 1)])
def test_losses_and_outputs_that_a_module_keeps_for_a_log_may_differ(kept: str, divided: int) -> None:
    (alone,) = run_ranks(losses_of, 1, kept, divided, timeout_s=120)
    for losses in run_ranks(losses_of, 2, kept, divided, timeout_s=120):
        assert losses == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("kept", ["scale", "criterion, scaled", "center"])
def test_what_the_next_loss_is_computed_with_may_not(kept: str) -> None:
    for refused in run_ranks(losses_of, 2, kept, 1, timeout_s=120):
        assert isinstance(refused, str)
        assert "keeps from batch to batch" in refused or "'center' of the System" in refused
