"""What a loop keeps from batch to batch, and its loss depends on, is that of all ranks or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks

SAMPLES, QUEUE = 40, 6


class Loop:
    """What a program keeps, how its loss comes of it, and when and how it is brought up to date."""

    begins = torch.zeros(3).double()
    when = "after the update"

    def __init__(self) -> None:
        self.kept: Any = self.begins.clone()
        self.steps = 0

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return ((out - self.kept).softmax(1) * y).sum(1).square().mean()

    def update(self, out: Tensor) -> None:
        self.kept = 0.9 * self.kept + 0.1 * out.mean(0)


class EarlyCenter(Loop):
    when = "before backward"


class CenterInPlace(Loop):
    def update(self, out: Tensor) -> None:
        self.kept.mul_(0.9).add_(out.mean(0), alpha=0.1)


class AveragedCenter(Loop):
    def update(self, out: Tensor) -> None:
        self.kept = 0.9 * self.kept + 0.1 * (hocket.average(out.mean(0)) if dist.is_initialized() else out.mean(0))


class ReducedCenter(Loop):
    def update(self, out: Tensor) -> None:
        super().update(out)
        if dist.is_initialized():
            dist.all_reduce(self.kept, dist.ReduceOp.AVG)


class Queue(Loop):
    begins = torch.arange(3.0 * QUEUE).double().reshape(QUEUE, 3).cos()

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss((out @ self.kept.T).softmax(1) @ self.kept, y)

    def update(self, out: Tensor) -> None:
        at = self.steps * 2 % QUEUE
        self.kept[at : at + 2] = out[:2]


class NewQueue(Queue):
    def update(self, out: Tensor) -> None:
        self.kept = torch.cat([self.kept, out])[-QUEUE:]


class Keys(Queue):
    """The queue is the samples of the batch before."""

    begins = torch.ones(4, 3).double()

    def update(self, out: Tensor) -> None:
        self.kept = out


class GatheredQueue(Queue):
    def update(self, out: Tensor) -> None:
        if dist.is_initialized():
            parts = [torch.zeros_like(out) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, out.contiguous())
            out = torch.cat(parts)
        self.kept = torch.cat([self.kept, out])[-QUEUE:]


class State(Loop):
    """A place for each sample, as a recurrent state has it."""

    begins = torch.zeros(1, 3).double()

    def update(self, out: Tensor) -> None:
        self.kept = 0.5 * out


class Padded(Loop):
    """Memory that is used again, for more samples than a rank has."""

    begins = torch.zeros(SAMPLES, 3).double()

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        self.kept.zero_()
        self.kept[: len(y)] = y
        return F.mse_loss(out, self.kept[: len(y)])

    def update(self, out: Tensor) -> None: ...


class Log(Loop):
    """What no loss depends on may be each rank's own."""

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(out, y)
        self.kept = self.kept + loss.detach()
        return loss

    def update(self, out: Tensor) -> None: ...


REFUSED = (Loop, EarlyCenter, CenterInPlace, Queue, NewQueue)
RIGHT = (AveragedCenter, ReducedCenter, GatheredQueue, State, Padded, Log)


def trained(kind: type[Loop]) -> list[float] | str:
    """Return the losses, or the error."""
    torch.manual_seed(0)
    loop, model = kind(), nn.Linear(5, 3).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.5)
    x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1)).double()
    loader: Any = DataLoader(TensorDataset(x, x[:, :3].sin()), batch_size=8)
    report: Callable[[Any], Any] = float
    if dist.is_initialized():
        model, optimizer, loader = hocket.distribute(model, optimizer, loader)
        report = hocket.average
    losses = []
    try:
        for x, y in loader:
            out = model(x)
            loss = loop.loss(out, y)
            if loop.when == "before backward":
                loop.update(out.detach())
            optimizer.zero_grad()
            loss.backward()
            losses.append(float(report(loss)))  # ranks talk before the loop keeps what it computes
            optimizer.step()
            if loop.when == "after the update":
                loop.update(out.detach())
            loop.steps += 1
    except RuntimeError as error:
        return str(error)
    return losses


def everything() -> list[list[float] | str]:
    return [trained(kind) for kind in (*REFUSED, Keys, *RIGHT)]


@pytest.fixture(scope="module")
def ranks() -> list[list[list[float] | str]]:
    """What comes of each loop on each of two ranks."""
    return run_ranks(everything, 2, timeout_s=60)


@pytest.mark.parametrize("at", range(len(REFUSED)), ids=[one.__name__ for one in REFUSED])
def test_statistics_and_samples_of_one_rank_are_refused(ranks: list[list[list[float] | str]], at: int) -> None:
    """The losses of DINO's center and MoCo's queue were 3% and 19% off."""
    first, other = (found[at] for found in ranks)
    assert isinstance(first, str)
    assert first == other
    assert "the loss depends on what the loop keeps from batch to batch" in first
    assert f"shape {list(REFUSED[at].begins.shape)}" in first


def test_a_queue_of_the_batch_before_is_refused_though_it_has_a_place_for_each_sample(
    ranks: list[list[list[float] | str]],
) -> None:
    for found in ranks:
        assert "the loss of a sample depends on other samples" in str(found[len(REFUSED)])


@pytest.mark.parametrize("at", range(len(RIGHT)), ids=[one.__name__ for one in RIGHT])
def test_what_ranks_have_alike_or_of_their_own_samples_is_right(ranks: list[list[list[float] | str]], at: int) -> None:
    alone = trained(RIGHT[at])
    for found in ranks:
        assert found[len(REFUSED) + 1 + at] == pytest.approx(alone, rel=1e-12)
