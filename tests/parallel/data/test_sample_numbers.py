"""Random numbers for samples: each rank draws its own, also where all ranks are seeded alike."""

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.parallel.data._sample_numbers import draws_apart, draws_of
from hocket.testing import run_ranks

SAMPLES, BATCH = 24, 8


class Noisy(nn.Module):
    """Adds noise to samples, and keeps what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.drawn = nn.Linear(3, 3), nn.Dropout(0.5), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x)
        self.drawn.append(noise.flatten().tolist())
        return self.inner(self.drop(x + noise))


class LayerLeftOut(Noisy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if torch.rand(()) < 2 else x


class Quiet(Noisy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drawn.append([0.0])
        return self.inner(x)


def trained(way: str, kind: type[Noisy], in_loop: bool = False) -> tuple[list[Any], list[float], list[str]]:
    """Return what the last steps drew in the model, what the loop drew, and the warnings."""
    torch.manual_seed(0)
    model, loader = kind(), DataLoader(TensorDataset(torch.ones(SAMPLES, 3), torch.ones(SAMPLES, 3)), batch_size=BATCH)
    drawn, optimizer, after = model.drawn, torch.optim.SGD(model.parameters(), lr=0.1), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if way == "trainer":
            trainer = hocket.Trainer(model, F.mse_loss, optimizer)
            for batch in trainer.batches(loader):
                trainer.step(batch)
                after.append(torch.rand(()).item())
        else:
            model, optimizer, loader = hocket.distribute(model, optimizer, loader)
            for x, y in loader:
                F.mse_loss(model(x + torch.randn_like(x) if in_loop else x), y).backward()
                optimizer.step()
                after.append(torch.rand(()).item())
    return drawn[-2:], after, [str(one.message) for one in caught if "seeded alike" in str(one.message)]


@pytest.mark.parametrize("way", ["distribute", "trainer"])
def test_ranks_draw_their_own_for_samples_and_alike_besides(way: str) -> None:
    (first, loop, said), (other, other_loop, _) = run_ranks(trained, 2, way, Noisy)
    assert first[0] != other[0]
    assert first[1] != other[1]
    assert first[0] != first[1]
    assert loop == other_loop
    assert len(set(loop)) == len(loop)
    assert not said


def test_what_holds_for_all_of_a_batch_stays_alike_and_is_told() -> None:
    (first, loop, said), (other, other_loop, silent) = run_ranks(trained, 2, "distribute", LayerLeftOut)
    assert first == other
    assert loop == other_loop
    assert len(said) == 1
    assert "others that hold for all of a batch" in said[0]
    assert not silent


def test_noise_that_the_loop_draws_is_told() -> None:
    (_, _, said), _ = run_ranks(trained, 2, "distribute", Quiet, True)
    assert len(said) == 1
    assert "the loop draws random numbers" in said[0]


def test_a_model_that_draws_nothing_leaves_the_loop_its_numbers() -> None:
    (_, loop, said), _ = run_ranks(trained, 2, "distribute", Quiet)
    torch.manual_seed(0)
    Quiet()
    assert loop == [torch.rand(()).item() for _ in loop]
    assert not said


def trained_by(plan: hocket.Plan) -> tuple[list[float], list[float]]:
    """Return sums of the last outputs that the loss saw, of samples that are all the same, and what the loop drew."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 8), nn.Dropout(0.5))
    seen, after, x = [], [], torch.ones(8, 8)

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(output.sum().item())
        return ((output - y) ** 2).mean()

    trainer = hocket.Trainer(model, loss, torch.optim.SGD(model.parameters(), lr=0.0), plan, sample=x)
    for _ in range(3):
        trainer.step((x, torch.zeros(8, 8)))
        after.append(torch.rand(()).item())
    trainer.close()
    return seen[-2:], after


def of_every_plan() -> list[tuple[list[float], list[float]]]:
    plans = [
        hocket.Plan(data_parallel_degree=2, pipeline_parallel_degree=2, micro_batches=2),
        hocket.Plan(data_parallel_degree=2, tensor_parallel_degree=2),
        hocket.Plan(synchronisation="local:2"),
    ]
    return [trained_by(plan) for plan in plans]


@pytest.mark.long
def test_groups_that_divide_the_model_draw_their_own_and_the_loop_alike() -> None:
    ranks = run_ranks(of_every_plan, 4)
    for number, group in enumerate([lambda r: r % 2, lambda r: r // 2, lambda r: r]):
        seen = {(group(rank), tuple(found[number][0])) for rank, found in enumerate(ranks) if found[number][0]}
        assert len(seen) == len({one for _, one in seen}) == len({one for one, _ in seen}) > 1
        assert len({tuple(found[number][1]) for found in ranks}) == 1


def test_numbers_in_the_shape_of_a_parameter_are_not_for_samples() -> None:
    layer = nn.Linear(3, 4)
    draws = draws_of([layer], 4, lambda: layer(torch.ones(4, 3)) + torch.rand_like(layer.weight).sum())
    assert (draws.by_samples, draws.others) == (False, True)
    draws = draws_of([layer], 4, lambda: F.dropout(layer(torch.ones(4, 3)), 0.5))
    assert (draws.by_samples, draws.others) == (True, False)


class ByOthers(Noisy):
    """Leaves out samples by numbers of numpy or Python, or of torch one by one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self.inner(x)
        if self.kind == "numpy":
            keep = (np.random.rand(len(x)) < 0.5).tolist()
        elif self.kind == "Python":
            keep = [random.random() < 0.5 for _ in x]
        elif self.kind == "torch":
            keep = [torch.rand(()).item() < 0.5 for _ in x]
        else:
            keep = [random.random() + np.random.rand() < 1] * len(x)
        return self.inner(x) * torch.tensor(keep)[:, None]


def told_of(kind: str) -> list[str]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    made, loader = ByOthers(kind), DataLoader(TensorDataset(torch.randn(SAMPLES, 3)), batch_size=BATCH)
    model, optimizer, loader = hocket.distribute(made, torch.optim.SGD(made.parameters(), lr=0.1), loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for (x,) in loader:
            model(x).pow(2).mean().backward()
            optimizer.step()
    return [str(one.message) for one in caught if "seeded alike" in str(one.message)]


@pytest.mark.parametrize(
    ("kind", "said"),
    [("numpy", "numbers of numpy for its samples"), ("Python", "numbers of Python for its samples"), ("torch", "both")],
)
def test_numbers_for_samples_that_torch_does_not_draw_or_one_by_one_are_told_of(kind: str, said: str) -> None:
    (first,), second = run_ranks(told_of, 2, kind)
    assert said in first
    assert second == []


def test_numbers_of_numpy_and_python_for_a_batch_are_not_told_of() -> None:
    assert run_ranks(told_of, 2, "batch") == [[], []]


class LabelsLeftOut(Noisy):
    """Draws a number for each sample: a row, and no more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = torch.rand(len(x))
        self.drawn.append(left.tolist())
        return self.inner(x) * (left < 0.5)[:, None]


def one_each() -> list[list[float]]:
    torch.manual_seed(0)
    made = LabelsLeftOut()
    data = TensorDataset(torch.randn(12, 3))
    model, optimizer, loader = hocket.distribute(
        made, torch.optim.SGD(made.parameters(), lr=0.1), DataLoader(data, batch_size=2)
    )
    for (x,) in loader:
        model(x).pow(2).mean().backward()
        optimizer.step()
    return made.drawn[-5:]


def test_ranks_of_one_sample_each_draw_their_own() -> None:
    first, second = run_ranks(one_each, 2)
    assert all(a != b for a, b in zip(first, second, strict=True))


class LikeItsTable(Noisy):
    """Draws noise for four samples of six numbers, beside a table of that size, or for the table."""

    def __init__(self, of_table: bool) -> None:
        super().__init__()
        self.table, self.inner, self.of_table = nn.Parameter(torch.zeros(4, 6)), nn.Linear(6, 5), of_table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.table + torch.randn_like(self.table) if self.of_table else self.table
        return self.inner(x + table.sum(0) if self.of_table else x + torch.randn_like(x) + table.sum(0))


@pytest.mark.parametrize("of_table", [False, True])
def test_numbers_for_samples_in_the_shape_of_a_parameter_are_told_from_those_for_it(of_table: bool) -> None:
    draws = draws_apart(LikeItsTable(of_table), ((torch.ones(4, 6),), {}), 4)
    assert (draws.by_samples, draws.others) == (not of_table, of_table)
