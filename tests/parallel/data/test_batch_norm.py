"""Batch norm over ranks is batch norm over the batch, on the Trainer and in a loop of the user's own."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks

BATCH = 8


class NormWithActivation(nn.BatchNorm2d):
    """A class of a user's, as timm has one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.num_batches_tracked is not None
        momentum = 0.1 if self.momentum is None else self.momentum
        if self.training:
            self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        return F.relu(F.batch_norm(x, *statistics, self.weight, self.bias, self.training, momentum, self.eps))


def setting(samples: int) -> tuple[nn.Module, TensorDataset, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        NormWithActivation(4),
        nn.Flatten(),
        nn.Linear(36, 6),
        nn.BatchNorm1d(6, momentum=None, affine=False),
        nn.Linear(6, 3),
    ).double()
    data = TensorDataset(3 + torch.randn(samples, 2, 5, 5).double(), torch.randint(0, 3, (samples,)))
    return model, data, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def both_halves() -> dict[bool, list[torch.Tensor]]:
    return {weight: halves(weight) for weight in (True, False)}


def halves(weight: bool) -> list[torch.Tensor]:
    """What a batch norm with a weight alone, or a bias alone, leaves after a step."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    setattr(model[1], "bias" if weight else "weight", None)
    x, y = torch.randn(6, 3).double(), torch.randn(6, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hocket.Trainer(model, F.mse_loss, optimizer, Plan(sync_batch_norm=True))
    for batch in trainer.batches(DataLoader(TensorDataset(x, y), batch_size=6)):
        trainer.step(batch)
    return [p.detach().clone() for p in model.parameters()]


@pytest.fixture(scope="module")
def ranks_halves() -> list[dict[bool, list[torch.Tensor]]]:
    return run_ranks(both_halves, 2)


@pytest.mark.parametrize("weight", [True, False])
def test_a_weight_or_a_bias_may_be_left_out(ranks_halves: list[dict[bool, list[torch.Tensor]]], weight: bool) -> None:
    expected = halves(weight)
    for rank in ranks_halves:
        for got, wanted in zip(rank[weight], expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-13)


def behind_an_instance_norm() -> list[list[float]]:
    """Statistics of what has nearly the same mean and variance in any samples."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.InstanceNorm1d(3), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(12, 2)).double()
    x, y = torch.randn(4, 3, 4).double(), torch.randint(0, 2, (4,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.Trainer(model, F.cross_entropy, optimizer, Plan(sync_batch_norm=True)).step((x, y))
    return statistics(model)


def test_samples_of_like_statistics_are_not_taken_for_the_same() -> None:
    (expected,) = run_ranks(behind_an_instance_norm, 1)
    for found in run_ranks(behind_an_instance_norm, 2):
        assert found == [pytest.approx(one, rel=1e-11, abs=1e-13) for one in expected]


def warned_of_parts() -> list[str]:
    """What is said of synchronised batch norm in parts of a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    x, y = torch.randn(8, 3) * torch.arange(1, 9).view(8, 1), torch.randint(0, 2, (8,))
    trainer = hocket.Trainer(
        model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), Plan(sync_batch_norm=True, accumulate=2)
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.step((x, y))
    return [str(one.message) for one in said]


def test_no_advice_to_synchronise_what_is_synchronised() -> None:
    said = [line for line in run_ranks(warned_of_parts, 2)[0] if "normalises each part" in line]
    assert len(said) == 1
    assert "use layer or group norm" in said[0]


def statistics(model: nn.Module) -> list[list[float]]:
    return [buffer.double().flatten().tolist() for buffer in model.buffers()]


def plain(samples: int, groups: int = 1) -> tuple[list[float], list[list[float]], float]:
    """One process; with several groups, each has its own statistics."""
    model, data, optimizer = setting(samples)
    losses = []
    for _ in range(2):
        for x, y in DataLoader(data, batch_size=BATCH, shuffle=True):
            optimizer.zero_grad()
            parts = zip(x.chunk(groups), y.chunk(groups), strict=True)
            loss = sum(F.cross_entropy(model(a), b) * len(a) / len(x) for a, b in parts)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    model.eval()
    return losses, statistics(model), F.cross_entropy(model(data.tensors[0]), data.tensors[1]).item()


def by_trainer(samples: int, plan: Plan) -> Any:
    model, data, optimizer = setting(samples)
    trainer = hocket.Trainer(model, F.cross_entropy, optimizer, plan)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    losses = [float(trainer.step(batch)) for _ in range(2) for batch in trainer.batches(loader)]
    return losses, statistics(model), trainer.evaluate(DataLoader(data, batch_size=7))


def by_loop(samples: int) -> Any:
    model, data, optimizer = setting(samples)
    loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    distributed, optimizer, loader = hocket.distribute(model, optimizer, loader, sync_batch_norm=True)
    # A program that freezes them between epochs finds them by their class.
    assert norms == [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)] != []
    losses = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(distributed(x), y)
            loss.backward()
            optimizer.step()
            losses.append(hocket.average(loss).item())
    return losses, statistics(model)


def everything(plans: list[Plan]) -> Any:
    # 18 samples: the last batch has 2, so that one of three ranks has no sample in it.
    return [by_trainer(18, plan) for plan in plans], by_loop(18)


@pytest.mark.long
def test_statistics_and_losses_are_those_of_the_whole_batch_even_if_ranks_have_unequal_parts() -> None:
    losses, buffers, metric = plain(18)
    plans = [Plan(sync_batch_norm=True, shard=s) for s in ("none", "gradients", "parameters")]
    for ranks in run_ranks(everything, 3, plans):
        trained, looped = ranks
        for found in trained:
            assert found[0] == pytest.approx(losses, rel=1e-11)
            assert found[2] == pytest.approx(metric, rel=1e-11)
        for _, mine, *_ in (*trained, looped):
            for here, there in zip(mine, buffers, strict=True):
                assert here == pytest.approx(there, rel=1e-11)
        assert looped[0] == pytest.approx(losses, rel=1e-11)


def in_groups_and_alone() -> Any:
    return [by_trainer(16, plan) for plan in (Plan(sync_batch_norm=True, batch_norm_group=2), Plan())]


@pytest.fixture(scope="module")
def on_four() -> list[Any]:
    """Of each rank, what it found with statistics of groups of two, and with its own."""
    return run_ranks(in_groups_and_alone, 4)


def test_statistics_can_be_those_of_small_groups_of_ranks(on_four: list[Any]) -> None:
    losses, _, _ = plain(16, groups=2)
    for found, _ in on_four:
        assert found[0] == pytest.approx(losses, rel=1e-11)


def test_without_synchronisation_the_losses_are_others(on_four: list[Any]) -> None:
    _, found = on_four[0]
    assert found[0] != pytest.approx(plain(16)[0], rel=1e-3)


def averaged_weights(shared: bool) -> list[list[float]]:
    """Statistics of averaged weights, of batches that ranks share or that each has alone, as buffers."""
    model, data, optimizer = setting(20)
    loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True)
    distributed, optimizer, parts = hocket.distribute(model, optimizer, loader, sync_batch_norm=True)
    averages = AveragedModel(distributed)
    for x, y in parts:
        optimizer.zero_grad()
        F.cross_entropy(distributed(x), y).backward()
        optimizer.step()
        averages.update_parameters(distributed)
    update_bn(parts if shared else DataLoader(data, batch_size=BATCH), averages)
    assert [type(one) for one in pickle.loads(pickle.dumps(model)).modules()] == [
        type(m) for m in setting(1)[0].modules()
    ]
    return statistics(averages.module)


@pytest.mark.parametrize("shared", [True, False])
def test_averaged_weights_get_the_statistics_of_whole_batches(shared: bool) -> None:
    (expected,) = run_ranks(averaged_weights, 1, shared)
    for found in run_ranks(averaged_weights, 2, shared):
        for here, there in zip(found, expected, strict=True):
            assert here == pytest.approx(there, rel=1e-11)
