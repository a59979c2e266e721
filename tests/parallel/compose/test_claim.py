"""Others that train what a Trainer trains: done as on one device, or refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks

from ..under_way import hidden_until_waited_for

PLANS = {
    "data": Plan(bucket_bytes=4096),
    "priority": Plan(priority=True),
    "optimizer": Plan(shard="optimizer"),
    "gradients": Plan(shard="gradients"),
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
        step_of(net, loss_fn, torch.optim.SGD(net.parameters(), 0.01), plan)
        for loss_fn in (nn.functional.mse_loss, squares)
    ]
    return [float(step((X, Y))) for _ in range(3) for step in steps]


def one_after_another(plan: Plan | None, *, kept: bool = False) -> list[float]:
    """Train by a Trainer and then by a new one, which is what errors of the first may advise."""
    net, losses, steps = model(), [], []
    for loss_fn in (nn.functional.mse_loss, squares):
        step = step_of(net, loss_fn, torch.optim.SGD(net.parameters(), 0.01), plan)
        losses += [float(step((X, Y))) for _ in range(3)]
        if kept:
            steps.append(step)
    return losses


def with_distribute_afterwards(plan: Plan | None) -> list[float]:
    """Train by a Trainer, and then, without it, in a loop."""
    net = model()
    losses = [float(step_of(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), 0.1), plan)((X, Y)))]
    rest: Any = net, torch.optim.Adam(net.parameters(), 0.01), [(X, Y)] * 2
    if plan is not None:
        data = torch.utils.data.TensorDataset(X.repeat(2, 1), Y.repeat(2, 1))
        rest = hocket.distribute(net, rest[1], torch.utils.data.DataLoader(data, 8))
    for x, y in rest[2]:
        rest[1].zero_grad()
        loss = nn.functional.mse_loss(rest[0](x), y)
        loss.backward()
        rest[1].step()
    return [*losses, *(float(p.detach().square().sum()) for p in net.parameters())]


def saved_by_the_former(plan: Plan | None) -> list[float]:
    """Save by a Trainer what a later one has trained."""
    net = model()
    first, second = (
        hocket.Trainer(net, squares, torch.optim.SGD(net.parameters(), 0.1), plan or Plan(), sample=X) for _ in range(2)
    )
    second.step((X, Y))
    return [float(one.square().sum()) for one in first.state_dict().values()]


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


def with_one_optimizer(plan: Plan | None) -> list[float]:
    """Train by one Trainer and then by another, with the optimizer object of the first."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    first = step_of(net, nn.functional.mse_loss, optimizer, plan)
    losses = [float(first((X, Y)))]
    return [*losses, float(step_of(net, squares, optimizer, plan)((X, Y)))]


ACTS: dict[str, Any] = {
    "inside": one_inside_of_another,
    "optimizers": two_optimizers,
    "trainers": two_trainers,
    "saved by the former": saved_by_the_former,
    "in turn": one_after_another,
    "and then distribute": with_distribute_afterwards,
    "in turn, with one optimizer": with_one_optimizer,
    "in turn, both kept": functools.partial(one_after_another, kept=True),
}
DIVIDED = "has divided this model among ranks before"
REFUSED = {
    ("priority", "inside"): "whose state_dict cannot be told to wait for them",
    ("priority", "optimizers"): "a second optimizer (Adam) updates parameter '2.weight'",
    ("optimizer", "optimizers"): "a second optimizer (Adam) updates parameter '2.weight'",
    ("gradients", "optimizers"): "a second optimizer (Adam) updates parameter '2.weight'",
    ("parameters", "optimizers"): "a second optimizer (Adam) updates parameter '2.weight'",
    ("optimizer", "in turn, with one optimizer"): "another Trainer works with this optimizer (Adam)",
    ("gradients", "in turn, with one optimizer"): "another Trainer works with this optimizer (Adam)",
    **{
        (plan, act): "another Trainer has been made of the same parameters since"
        for plan in ("optimizer", "gradients")
        for act in ("trainers", "saved by the former")
    },
    **{
        (plan, act): DIVIDED for plan in ("parameters", "tensor") for act in ACTS if act not in ("inside", "optimizers")
    },
}


def said(act: Any, *args: Any) -> Any:
    try:
        return act(*args)
    except (RuntimeError, ValueError) as error:
        return str(error)


def each(name: str) -> dict[str, Any]:
    with hidden_until_waited_for():
        found = {act: said(do, PLANS[name]) for act, do in ACTS.items()}
    return {**found, "whole": said(two_optimizers, PLANS[name], "Adafactor")}


@pytest.mark.long
@pytest.mark.sampled(1)
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


class Distilled(nn.Module):
    """A student that calls its teacher, whose parameters are not its own."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self._teacher = model(), [teacher]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self._teacher[0](x)
        return self.student(x) - target


def taught(plan: Plan) -> Any:
    """Return what a Trainer of a student says whose teacher is divided."""
    teacher = model()
    kept = step_of(teacher, squares, torch.optim.SGD(teacher.parameters(), 0.1), plan)
    net = Distilled(teacher)
    pipeline = Plan(pipeline_parallel_degree=2, micro_batches=2)
    return said(step_of, net, squares, torch.optim.SGD(net.student.parameters(), 0.1), pipeline), kept is None


@pytest.mark.parametrize("plan", [Plan(pipeline_parallel_degree=2, micro_batches=2), PLANS["tensor"]])
def test_stages_that_call_a_divided_model_are_refused(plan: Plan) -> None:
    for found, _ in run_ranks(taught, 2, plan, timeout_s=60):
        assert "calls another model (Sequential) that a Trainer has divided among ranks" in str(found)


def after_a_refused_loop(refuse: bool) -> list[float]:
    """Train by a Trainer what a loop has begun with, whose loss was refused, and which the program still holds."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 4)
    if refuse:
        held = hocket.distribute(net, optimizer, batches)
        output = held[0](next(iter(held[2]))[0])
        with pytest.raises(RuntimeError, match="samples of the batch meet"):
            (output @ output.T).logsumexp(1).mean().backward()
        optimizer.zero_grad()
    weighted = nn.BCEWithLogitsLoss(weight=torch.arange(1.0, 9.0, dtype=torch.float64))
    trainer = hocket.Trainer(net, lambda *both: weighted(*both) + 0.1 * nn.functional.mse_loss(*both), optimizer)
    return [float(trainer.step(batch)) for _ in range(2) for batch in trainer.batches(batches)]


def test_a_trainer_follows_a_loop_that_was_refused() -> None:
    (alone,) = run_ranks(after_a_refused_loop, 1, False)
    for losses in run_ranks(after_a_refused_loop, 2, True):
        assert losses == pytest.approx(alone, rel=1e-12)  # rounding alone differs
