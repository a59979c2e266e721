"""Ranks that are to compute with one batch, and were given another each, end with an error that names the value."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks

PLANS = {
    "data": Plan(),
    "priority": Plan(priority=True),
    "parameters": Plan(shard="parameters"),
    "tensor": Plan(tensor_parallel_degree=2),
    "pipeline": Plan(pipeline_parallel_degree=2, micro_batches=1),
}


class Noise(Dataset[Any]):
    """Draws of the system what nobody can seed."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.tensor([random.SystemRandom().random() for _ in range(4)])
        return x, x.sum().reshape(1)


def trained(name: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return hocket.Trainer(model, nn.functional.mse_loss, optimizer, PLANS[name], sample=torch.ones(4, 4))


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def with_one_batch_and_with_two(name: str) -> list[str]:
    same = torch.Generator().manual_seed(3)
    x, y = torch.randn(4, 4, generator=same), torch.randn(4, 1, generator=same)
    last = x * (1 + 1e-7 * dist.get_rank())  # as another processor rounds it
    other = torch.randn(4, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    trainer = trained(name)
    found = [said(lambda: trainer.step((last, y))), said(lambda: trainer.predict(last))]
    trainer = trained(name)
    found += [said(lambda: trainer.step((x, other))), said(lambda: trainer.predict(other))]

    def called() -> None:
        with torch.no_grad():
            trainer.model.eval()(other)

    found.append(said(called) if name in ("tensor", "pipeline") else "the model")
    loader = DataLoader(Noise(), batch_size=4)
    trainer, other_trainer = trained(name), trained(name)
    found.append(said(lambda: [trainer.step(batch) for batch in trainer.batches(loader)]))
    found.append(said(lambda: other_trainer.evaluate(loader)))
    trainer, loader = trained(name), DataLoader(list(zip(x, y, strict=True)), batch_size=4)
    for u, v in trainer.batches(loader):
        found.append(said(lambda u=u, v=v: trainer.step((torch.cat([u, -u]), torch.cat([v, v])))))  # type: ignore[misc]
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PLANS)
def test_another_batch_on_each_rank_is_refused(name: str) -> None:
    """The loss was that of a part of each, and predictions were made of two batches, or of rank 0's."""
    shared = name in ("tensor", "pipeline")  # of data parallelism each rank loads its own part
    for rank in run_ranks(with_one_batch_and_with_two, 2, name, timeout_s=100):
        *alike, step, predicted, called, loaded, evaluated, doubled = rank
        assert (doubled == "") is shared
        assert alike == ["", ""]
        assert step.startswith("trainer.step was given something else on rank 1 than on rank 0")
        assert "batch[1] is float32 [4, 4]" in step
        assert "loop over trainer.batches(loader)" in step
        assert predicted.startswith("trainer.predict was given something else on rank 1 than on rank 0")
        assert called.startswith("the model")
        assert [one.startswith(("trainer.step", "trainer.evaluate")) for one in (loaded, evaluated)] == [shared] * 2


def mixed(how: str, reduction: Literal["mean", "sum"], plan: Plan | None = None) -> list[float]:
    """The losses of a loop that steps on parts of a loader's batches, and on what it makes of them or beside them."""
    torch.manual_seed(0)
    x, y = torch.randn(23, 6, dtype=torch.float64), torch.randint(4, (23,))
    model = nn.Linear(6, 4).double()
    loss_fn = functools.partial(F.cross_entropy, reduction=reduction)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    trainer = hocket.Trainer(model, loss_fn, optimizer, plan or Plan(), loss_reduction=reduction)
    loader = DataLoader(TensorDataset(x, y), batch_size=5)
    losses = []
    for _ in range(2):
        batches = trainer.batches(loader)
        for i, (some, target) in enumerate(list(batches) if how == "ahead" else batches):
            batch = some.clone(), target.clone()
            if how == "joined":
                batch = torch.cat([some, some + 0.1]), torch.cat([target, target])
            sizes = (2, 3, 5) if how == "between" and i == 1 else ()  # 2 and 3 are those of the ranks' parts, too
            losses += [float(trainer.step((x[:size], y[:size]))) for size in sizes]
            losses.append(float(trainer.step(batch)))
        for size in (1, 2, 3, 10) if how in ("after", "evaluated") else ():
            if how == "evaluated":  # the first rank's part begins where the batch does
                losses.append(trainer.evaluate([(x[:size], y[:size])]))
            losses.append(float(trainer.step((x[:size], y[:size]))))
    return losses


WAYS = list(itertools.product(("moved", "ahead", "between", "after", "evaluated"), ("mean", "sum")))


def all_mixed() -> list[list[float]]:
    plans = Plan(), Plan(priority=True)
    return [mixed(how, reduction, plan) for plan in plans for how, reduction in WAYS]  # type: ignore[arg-type]


@pytest.mark.long
def test_parts_and_whole_batches_are_told_apart_in_any_order() -> None:
    (alone,) = run_ranks(all_mixed, 1)
    for losses in run_ranks(all_mixed, 2):
        for way, found, expected in zip(WAYS * 2, losses, alone, strict=True):
            assert found == pytest.approx(expected, rel=1e-12), way


def joined() -> str:
    try:
        mixed("joined", "mean")
    except ValueError as error:
        return str(error)
    return ""


def test_samples_that_a_loop_makes_of_a_part_are_refused() -> None:
    for said in run_ranks(joined, 2):
        assert "was given something else on rank 1 than on rank 0" in said


class Noisy(nn.Module):
    """A model that draws one number for its whole batch, by torch or by numpy; or none."""

    def __init__(self, draw: str) -> None:
        super().__init__()
        self.draw = draw
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.draw:
            x = x * float(torch.rand(()) if self.draw == "torch" else np.random.rand())
        return self.layers(x)


def seeded_by_rank(draw: str) -> str:
    torch.manual_seed(0)
    model, x = Noisy(draw), torch.randn(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan=Plan(tensor_parallel_degree=2), sample=x)
    torch.manual_seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    try:
        return str([float(trainer.step((x, x))) for _ in range(3)])
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("draw", ["torch", "numpy", ""])
def test_ranks_that_share_samples_and_draw_are_to_be_seeded_alike(draw: str) -> None:
    for found in run_ranks(seeded_by_rank, 2, draw):
        assert found.startswith("[") if not draw else f"draws random numbers ({draw})" in found
