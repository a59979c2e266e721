"""What a loop computes from `len(batch)` is that of a rank's part: it may divide a sum by it, all else is told of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks

Loss = Callable[[Tensor, Tensor, Tensor, nn.Module], Tensor | None]


def penalty(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def hidden(x: Tensor, out: Tensor, y: Tensor) -> Tensor:
    """A state is as large as the rank's part: asking so decides nothing."""
    state = torch.zeros(8, 3, dtype=torch.float64)[: len(x)]
    return F.mse_loss(out, y) if x.size(0) == int(state.shape[0]) else out.sum()


class Grows:
    """A loss whose factor grows from one epoch, of three batches, to the next."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, out: Tensor, y: Tensor, model: nn.Module) -> Tensor:
        self.calls += 1
        return F.mse_loss(out, y) * (0.1 if (self.calls - 1) % 6 < 3 else 0.3)


TWICE = "by another number that differs from rank to rank"
FACTOR, DECISION = "what it computes from len(batch)", "decides by how many samples"
CHANGE = "in a batch of another size"
CASES: dict[str, tuple[str, Loss]] = {
    "mean": ("", lambda x, out, y, _: F.mse_loss(out, y)),
    "by len": ("", lambda x, out, y, _: (out - y).square().sum() / len(x)),
    "by size": ("", lambda x, out, y, _: (out - y).square().sum() * (1 / x.size(0)) + F.mse_loss(out, y)),
    "same": ("", lambda x, out, y, _: F.mse_loss(out, y) * (len(x) / len(y)) + out.new_zeros(len(x)).mean()),
    "state": ("", lambda x, out, y, _: hidden(x, out, y)),
    "share": (FACTOR, lambda x, out, y, _: F.mse_loss(out, y) * len(x) / 24),
    "elements": (FACTOR, lambda x, out, y, _: F.mse_loss(out, y) * (x.numel() / 100)),
    "by einsum": ("", lambda x, out, y, _: torch.einsum("bc,bc->", out - y, out - y) / len(x)),
    "two counts": (TWICE, lambda x, out, y, _: (out - y).abs().sum() / (x > 0).sum() / len(x)),
    "by elements": ("", lambda x, out, y, _: (out - y).square().sum() / y.numel()),
    "number": (CHANGE, lambda x, out, y, _: F.mse_loss(out, y) * (0.1 * len(x))),
    "float": (CHANGE, lambda x, out, y, _: F.mse_loss(out, y) * (float(x.shape[0]) / 24) + out.square().mean()),
    "same number": ("", lambda x, out, y, _: 0.4 * F.mse_loss(out, y) + out.square().mean() * 0.1),
    "schedule": ("", Grows()),
    "root": (FACTOR, lambda x, out, y, _: (out - y).square().sum() / x.shape[0] ** 0.5),
    "penalty": (FACTOR, lambda x, out, y, model: F.mse_loss(out, y) + len(x) / 24 * penalty(model)),
    "left out": (DECISION, lambda x, out, y, _: F.mse_loss(out, y) if len(x) >= 6 else None),
    "last": (DECISION, lambda x, out, y, _: F.mse_loss(out, y) * (0.5 if len(x) < 4 else 1.0)),
}


def trained(loss_of: Loss) -> tuple[list[float], list[str]]:
    """Weights after two epochs, and what was told."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x = torch.randn(22, 4, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x[:, :3] * 2), batch_size=8)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model, optimizer, loader = hocket.distribute(model, torch.optim.SGD(model.parameters(), 0.1), loader)
        for _ in range(2):
            for inputs, target in loader:
                optimizer.zero_grad()
                loss = loss_of(inputs, model(inputs), target, model)
                if loss is not None:
                    loss.backward()
                    optimizer.step()
    weights = [one for p in model.parameters() for one in p.detach().flatten().tolist()]
    return weights, [str(one.message) for one in told]


def all_trained() -> dict[str, Any]:
    return {name: trained(loss_of) for name, (_, loss_of) in CASES.items()}


@pytest.mark.long
def test_what_a_loop_computes_from_the_size_of_a_batch_is_right_or_told() -> None:
    alone = all_trained()
    for rank, found in enumerate(run_ranks(all_trained, 2, timeout_s=90)):
        for name, (said, _) in CASES.items():
            weights, told = found[name]
            assert alone[name][1] == [], name
            if said:
                assert any(said in one for one in told) is (rank == 0), (name, told)
            else:
                assert told == [], name
                assert weights == pytest.approx(alone[name][0], rel=1e-9), name


def asked_of_inputs() -> list[Tensor]:
    """Gradients by samples of a loss that torch divides by their number, while a loop is followed."""
    model, _, loader = hocket.distribute(nn.Linear(6, 3), None, DataLoader(TensorDataset(torch.ones(16, 6)), 8))
    found = []
    for (x,) in loader:
        out = model(x.requires_grad_())
        loss = nn.functional.kl_div(out, out.detach(), reduction="batchmean")
        found += torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
    return found


def test_a_number_of_samples_in_a_loss_whose_gradient_is_asked_for() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a mean over this rank's samples
        for found in run_ranks(asked_of_inputs, 2):
            assert [one.shape for one in found] == [(4, 6)] * 2
