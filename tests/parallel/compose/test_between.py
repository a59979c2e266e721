"""What a program makes of a part of a batch before the step, or sets for its loss function, is refused or told of."""

from __future__ import annotations

import warnings
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


class Padding(nn.Linear):
    """Takes samples that lack features."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 6 - x.shape[1])))


Pair = tuple[Tensor, Tensor]


def normalised(x: Tensor, y: Tensor) -> Pair:
    return (x - x.mean(0)) / x.std(0), y


def weighted(x: Tensor, y: Tensor) -> Pair:
    """A column by how often the part has the sample's class."""
    return torch.cat([x[:, :5], 1 / torch.bincount(y, minlength=3)[y].double()[:, None]], 1), y


def mixed(x: Tensor, y: Tensor) -> Pair:
    return 0.7 * x + 0.3 * x.flip(0), y


def cut(x: Tensor, y: Tensor) -> Pair:
    """After as many features as the rank's first sample says."""
    return x[:, : 5 + bool(x[0, 0] > 0)], y


def scaled(x: Tensor, y: Tensor) -> Pair:
    """By each sample alone, in another order."""
    order = x[:, 0].argsort()
    return (x / x.norm(dim=1, keepdim=True))[order], y[order]


def trained(change: Callable[[Tensor, Tensor], Pair], plan: Plan, kept: str = "") -> tuple[list[float], str, list[str]]:
    """Return the losses of a loop, its error, and its warnings."""
    torch.manual_seed(0)
    model, state, losses, error = Padding(6, 3).double(), {"scale": 1.0, "log": 0.0}, list[float](), ""

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(out / state["scale"], y)
        state["log"] = loss.item()
        return loss

    random = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(20, 6, generator=random).double(), torch.randint(3, (20,), generator=random))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = hocket.Trainer(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), plan)
        try:
            for x, y in trainer.batches(DataLoader(data, batch_size=8)):
                state["scale"] = float(x.std()) if kept else 1.0
                losses.append(float(trainer.step(change(x, y))))
        except ValueError as refused:
            error = str(refused)
    return losses, error, [str(one.message) for one in caught]


def every_change() -> list[Any]:
    ways = [(normalised, ""), (weighted, ""), (mixed, ""), (scaled, ""), (scaled, "scale"), (cut, "")]
    return [trained(change, Plan(), kept) for change, kept in ways] + [trained(normalised, Plan(shard="parameters"))]


def test_what_a_loop_makes_of_its_part_is_refused_told_of_or_right() -> None:
    """It was trained with, and silent: each rank normalised its samples by its own."""
    expected = trained(scaled, Plan())
    assert expected[1:] == ("", [])
    for rank, (first, second, mix, alone, read, crop, sharded) in enumerate(run_ranks(every_change, 2, timeout_s=90)):
        assert all("samples that depend on others of this rank's part" in one[1] for one in (first, second, sharded))
        assert (mix[1], ["puts each sample beside another" in one for one in mix[2]]) == ("", [] if rank else [True])
        assert alone == (pytest.approx(expected[0], rel=1e-12), "", [])
        assert (read[1], ["state['scale'], which is" in one for one in read[2]]) == ("", [] if rank else [True])
        assert (crop[1], ["trainer.step samples of sizes" in one for one in crop[2]]) == ("", [] if rank else [True])


def by_numpy(x: Tensor, y: Tensor) -> Pair:
    rows = x.numpy()
    return torch.from_numpy((rows - rows.mean(0)) / rows.std(0)), y


def by_item(x: Tensor, y: Tensor) -> Pair:
    return torch.from_numpy(x.numpy() / x.abs().max().item()), y


def in_place(x: Tensor, y: Tensor) -> Pair:
    """Written to what the loader has yielded."""
    rows = x.numpy()
    rows -= rows.mean()
    return x + 0.0, y


def known(x: Tensor, y: Tensor) -> Pair:
    """By a statistic of the data set."""
    return torch.from_numpy((x.numpy() - 0.1) / 1.1), y


def each(x: Tensor, y: Tensor) -> Pair:
    """Each sample by its own."""
    rows = x.numpy()
    return torch.from_numpy((rows - rows.mean(1, keepdims=True)) / rows.std(1, keepdims=True)), y


def bent(x: Tensor, y: Tensor) -> Pair:
    return torch.from_numpy(np.tanh(x.numpy()) + np.log1p(np.abs(x.numpy()))), y


def backwards(x: Tensor, y: Tensor) -> Pair:
    """In another order."""
    return torch.from_numpy(x.numpy()[::-1].copy()), torch.from_numpy(y.numpy()[::-1].copy())


def rounded(x: Tensor, y: Tensor) -> Pair:
    return torch.from_numpy(x.numpy().round()), y


def single(x: Tensor, y: Tensor) -> Pair:
    return torch.from_numpy(x.numpy().astype("float32") / 7 - 3).double(), y


def turned(x: Tensor, y: Tensor) -> Pair:
    return torch.from_numpy(x.numpy()[:, ::-1].copy()), y


def kept(x: Tensor, y: Tensor) -> Pair:
    return x, y


def cleared(x: Tensor, y: Tensor) -> Pair:
    return torch.from_numpy(np.zeros_like(x.numpy())), y


def clipped(x: Tensor, y: Tensor) -> Pair:
    return torch.from_numpy(x.numpy().clip(-0.5, 0.5)), y


def doubled(x: Tensor, y: Tensor) -> Pair:
    """Written to what the loader has yielded."""
    rows = x.numpy()
    rows *= 2
    return x + 0.0, y


WRONG = by_numpy, by_item, in_place
RIGHT = known, each, bent, backwards, rounded, single, turned, kept, cleared, clipped, doubled


def every_rescaling() -> list[Any]:
    return [trained(change, Plan()) for change in WRONG + RIGHT] + [trained(by_numpy, Plan(shard="parameters"))]


@pytest.mark.long
def test_what_numpy_normalises_by_the_part_is_told_of() -> None:
    """Operators of numpy are not followed: it was silent, and 8% off. What one process does, too, is right."""
    expected = [trained(change, Plan()) for change in RIGHT]
    for rank, found in enumerate(run_ranks(every_rescaling, 2, timeout_s=90)):
        for losses, error, told in [*found[: len(WRONG)], found[-1]]:
            assert (len(losses), error) == (3, "")
            assert ["by numbers that other ranks do not have" in one for one in told] == ([] if rank else [True])
        for one, alone in zip(found[len(WRONG) : -1], expected, strict=True):
            assert one == (pytest.approx(alone[0], rel=1e-6), "", [])


def by_the_model(plan: Plan, choose: Callable[[Tensor], Tensor]) -> tuple[int, str]:
    """Return how many steps a loop makes with labels that the model gives its samples, and its error."""
    torch.manual_seed(0)
    model, steps = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double(), 0
    random = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 6, generator=random).double())
    trainer = hocket.Trainer(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), plan)
    try:
        for (x,) in trainer.batches(DataLoader(data, batch_size=8)):
            with torch.no_grad():
                labels = choose(trainer.model(x))
            trainer.step((x, labels))
            steps += 1
    except ValueError as refused:
        return steps, str(refused)
    return steps, ""


def confident(output: Tensor) -> Tensor:
    best, label = output.softmax(1).max(1)
    return torch.where(best > 0.4, label, -100)


def every_choice() -> list[tuple[int, str]]:
    choices: list[Callable[[Tensor], Tensor]] = [
        lambda output: (output - output.mean(0)).argmax(1),
        lambda output: output.argmax(1),
        lambda output: (output / 0.5).softmax(1),
        confident,
    ]
    return [by_the_model(plan, one) for plan in (Plan(), Plan(shard="parameters")) for one in choices]


@pytest.mark.long
def test_labels_that_the_model_gives_by_other_samples_are_refused_where_it_is_sharded_too() -> None:
    """Gathers of parameters passed for talk of a program, after which nothing was looked at: 13% off, and silent."""
    for found in run_ranks(every_choice, 2, timeout_s=90):
        for (steps, error), *right in (found[:4], found[4:]):
            assert steps == 0
            assert "samples that depend on others of this rank's part" in error
            assert right == [(4, "")] * 3
