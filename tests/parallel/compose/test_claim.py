"""Others that train what a Trainer trains: done as on one device, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks

PLANS = {
    "data": Plan(),
    "optimizer": Plan(shard="optimizer"),
    "parameters": Plan(shard="parameters"),
    "tensor": Plan(tensor_parallel_degree=2),
}
X = torch.linspace(-1, 1, 8 * 16, dtype=torch.float64).view(8, 16)
Y = torch.linspace(0, 1, 8 * 8, dtype=torch.float64).view(8, 8)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).double()


def squares(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


def step_of(net: nn.Module, loss_fn: Any, optimizer: Any, plan: Plan | None) -> Any:
    """Return a step of a Trainer, or of one process."""
    if plan is not None:
        return hocket.Trainer(net, loss_fn, optimizer, plan, sample=X).step

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_fn(net(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss  # type: ignore[no-any-return]

    return step


def two_optimizers(plan: Plan | None, second: str = "Adam") -> list[float]:
    net = model()
    first = torch.optim.SGD(net[0].parameters(), 0.1)
    other = getattr(torch.optim, second)(net[2].parameters(), 0.01)
    step, losses = step_of(net, nn.functional.mse_loss, first, plan), []
    for _ in range(3):
        other.zero_grad()
        losses.append(float(step((X, Y))))
        other.step()
    return losses


def two_trainers(plan: Plan | None) -> list[float]:
    net = model()
    steps = [
        step_of(net, loss_fn, torch.optim.SGD(net.parameters(), 0.1), plan)
        for loss_fn in (nn.functional.mse_loss, squares)
    ]
    return [float(step((X, Y))) for _ in range(3) for step in steps]


def one_after_another(plan: Plan | None) -> list[float]:
    """Train by a Trainer and then by a new one, which is what errors of the first may advise."""
    net, losses = model(), []
    for loss_fn in (nn.functional.mse_loss, squares):
        step = step_of(net, loss_fn, torch.optim.SGD(net.parameters(), 0.1), plan)
        losses += [float(step((X, Y))) for _ in range(2)]
    return losses


class Own(torch.optim.Optimizer):
    """An optimizer of which nothing is known."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)


class Wrapped:
    """An optimizer around another, as Lookahead is, that says of itself what it is."""

    elementwise = True

    def __init__(self, inner: Any) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self.step, self.zero_grad, self.state_dict = inner.step, inner.zero_grad, inner.state_dict
        self.load_state_dict = inner.load_state_dict


def one_inside_of_another(plan: Plan | None) -> list[float]:
    net = model()
    step = step_of(net, nn.functional.mse_loss, Wrapped(Own(net.parameters())), plan)
    return [float(step((X, Y))) for _ in range(3)]


ACTS: dict[str, Any] = {
    "inside": one_inside_of_another,
    "optimizers": two_optimizers,
    "trainers": two_trainers,
    "in turn": one_after_another,
}
DIVIDED = "has divided this model among ranks before"
REFUSED = {
    ("optimizer", "optimizers"): "a second optimizer (Adam) updates parameter '2.weight'",
    ("parameters", "optimizers"): "a second optimizer (Adam) updates parameter '2.weight'",
    ("optimizer", "trainers"): "another Trainer has been made of the same parameters since",
    **{(plan, act): DIVIDED for plan in ("parameters", "tensor") for act in ("trainers", "in turn")},
}


def said(act: Any, *args: Any) -> Any:
    try:
        return act(*args)
    except (RuntimeError, ValueError) as error:
        return str(error)


def each(name: str) -> dict[str, Any]:
    found = {act: said(do, PLANS[name]) for act, do in ACTS.items()}
    return {**found, "whole": said(two_optimizers, PLANS[name], "Adafactor")}


@pytest.mark.parametrize("name", PLANS)
def test_what_others_train_counts_or_is_refused(name: str) -> None:
    for found in run_ranks(each, 2, name, timeout_s=110):
        for act, do in ACTS.items():
            if (refusal := REFUSED.get((name, act))) is not None:
                assert refusal in found[act], act
            else:
                assert found[act] == pytest.approx(do(None), rel=1e-10), act
        if name == "tensor":
            assert "Adafactor is not known to work so" in found["whole"]
