"""Losses whose terms cancel, as those of policy gradients before the first update: what their values do not show."""

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
from hocket.planner import Plan
from hocket.testing import run_ranks


def ratios(outputs: Tensor) -> Tensor:
    """How much likelier actions are than they were: 1 before the first update."""
    logs = outputs.log_softmax(1)
    return (logs - logs.detach()).exp()


def clipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def of_groups(outputs: Tensor, rewards: Tensor) -> Tensor:
    """GRPO: rewards of a sample's completions are normalised over these, and add up to nothing."""
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return clipped(ratios(outputs), advantages).mean()


def of_groups_by_row(outputs: Tensor, rewards: Tensor) -> Tensor:
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return clipped(ratios(outputs), advantages).sum(1).mean()


def of_the_batch(outputs: Tensor, rewards: Tensor) -> Tensor:
    """PPO as it is published: advantages are normalised over the batch, and so add up to nothing."""
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    return clipped(ratios(outputs), advantages).mean()


def of_the_batch_and_values(outputs: Tensor, rewards: Tensor) -> Tensor:
    """Stable-Baselines3's: the value's loss is all of the first number."""
    policy = of_the_batch(outputs[:, :1], rewards[:, :1])
    return policy + 0.5 * F.mse_loss(outputs[:, 1], rewards[:, 1])


def left_out_and_whitened(outputs: Tensor, rewards: Tensor) -> Tensor:
    """RLOO: each row adds up to nothing, also when all are divided by the batch's deviation."""
    advantages = rewards - (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    return (-ratios(outputs) * advantages).sum(1).mean()


LossFn = Callable[[Tensor, Tensor], Tensor]
RIGHT: list[LossFn] = [of_groups, of_groups_by_row]
APART: list[LossFn] = [of_the_batch, of_the_batch_and_values, left_out_and_whitened]


class Policy(nn.Module):
    """Gives its outputs, or the loss of them if it is given rewards."""

    def __init__(self, loss_fn: LossFn | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.loss_fn = loss_fn

    def forward(self, x: Tensor, rewards: Tensor | None = None) -> Tensor:
        outputs = self.layers(x)
        return outputs if self.loss_fn is None else self.loss_fn(outputs, rewards)


def batches() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    x, rewards = (torch.randn(24, width, generator=draw, dtype=torch.float64) for width in (4, 3))
    return DataLoader(TensorDataset(x, rewards), batch_size=8)


def trained(loss_fn: LossFn, how: str, plan: dict[str, Any]) -> tuple[str, list[list[float]]]:
    """Train; return what is raised, and the weights in the end."""
    net: Any = Policy(loss_fn if how == "model" else None)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    model, loader = net, batches()
    try:
        if how == "trainer":
            trainer = hocket.Trainer(net, loss_fn, optimizer, plan=Plan(**plan), sample=next(iter(loader))[0])
            for x, rewards in loader:
                trainer.step((x, rewards))
        else:
            if how != "alone":
                model, optimizer, loader = hocket.distribute(net, optimizer, loader)
            for x, rewards in loader:
                optimizer.zero_grad()
                loss = model(x, rewards) if how == "model" else loss_fn(model(x), rewards)
                loss.backward()
                optimizer.step()
    except (RuntimeError, ValueError) as error:
        return str(error), []
    return "", [one.flatten().tolist() for one in net.parameters()]


HOWS = [("loop", {}), ("model", {}), ("trainer", {}), ("trainer", {"accumulate": 2})]


@pytest.mark.parametrize(("how", "plan"), HOWS)
@pytest.mark.parametrize("loss_fn", RIGHT)
def test_a_loss_of_each_sample_whose_terms_cancel_is_that_of_one_device(
    loss_fn: LossFn, how: str, plan: dict[str, Any]
) -> None:
    """It was refused: rounding was taken for samples that meet."""
    expected = trained(loss_fn, "alone", {})[1]
    for said, weights in run_ranks(trained, 2, loss_fn, how, plan):
        assert not said
        for mine, theirs in zip(weights, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("how", "plan"), HOWS)
@pytest.mark.parametrize("loss_fn", APART)
def test_a_statistic_of_the_batch_in_terms_that_cancel_is_refused(
    loss_fn: LossFn, how: str, plan: dict[str, Any]
) -> None:
    """It was silent where another term was all of the loss's number: 6.3e-2 off."""
    for said, _ in run_ranks(trained, 2, loss_fn, how, plan):
        assert "one term for each sample" in said or "samples meet in it" in said or "from other samples" in said


class Centred(nn.Module):
    """Computes a loss of its own in which there is a sum over centred weights: each part of a batch has all of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor, rewards: Tensor) -> Tensor:
        weight = self.layer.weight - self.layer.weight.mean()
        return F.mse_loss(F.linear(x, weight, self.layer.bias + weight.mean()), rewards)


def centred(alone: bool) -> list[list[float]]:
    net: Any = Centred()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    model, loader = net, batches()
    if not alone:
        model, optimizer, loader = hocket.distribute(net, optimizer, loader)
    for x, rewards in loader:
        optimizer.zero_grad()
        model(x, rewards).backward()
        optimizer.step()
    return [one.flatten().tolist() for one in net.parameters()]


def test_a_sum_over_weights_that_cancels_is_the_same_for_all_parts_of_a_batch() -> None:
    for weights in run_ranks(centred, 2, False):
        for mine, theirs in zip(weights, centred(True), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-14)
