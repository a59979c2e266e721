"""Several loaders that one loop trains with: together, by turns, one inside the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.parallel import CheckpointError
from hocket.parallel.compose import _preemption
from hocket.testing import deadline, run_ranks

_SAVED = 75

Step = Callable[[nn.Module, Any, Any], list[Tensor]]


def loader_of(samples: int, seed: int, batch_size: int = 6, **options: Any) -> DataLoader[Any]:
    """Return a loader of random samples, whose last batch ranks share unequally."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=draw, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.randint(3, (samples,), generator=draw)), batch_size, **options)


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)


def sums_of_means(model: nn.Module, one: Any, other: Any) -> list[Tensor]:
    return [cross_entropy(model(one[0]), one[1]) + 0.3 * cross_entropy(model(other[0]), other[1])]


def joined(model: nn.Module, one: Any, other: Any) -> list[Tensor]:
    return [cross_entropy(model(torch.cat([one[0], other[0]])), torch.cat([one[1], other[1]]))]


def apart(model: nn.Module, one: Any, other: Any) -> list[Tensor]:
    return [cross_entropy(model(x), y) / 2 for x, y in (one, other)]


STEPS: dict[str, Step] = {"sums of means": sums_of_means, "joined": joined, "apart": apart}


def trained(way: str, second: tuple[int, int], *, distributed: bool = True) -> list[float]:
    """Train with two loaders; return sums of the weights."""
    model, optimizer = built()
    a, b = loader_of(29, 1), loader_of(second[0], 2, second[1])
    if distributed:
        model, optimizer, (a, b) = hocket.distribute(model, optimizer, [a, b])
    if way == "nested":
        pairs = [[one] for one in a for one in (one, *b)]  # the batches are kept, and used after the loaders' end
    else:
        pairs = [list(pair) for pair in zip(a, b, strict=False)]
    for pair in pairs:
        optimizer.zero_grad()
        for loss in STEPS[way](model, *pair) if len(pair) == 2 else [cross_entropy(model(pair[0][0]), pair[0][1])]:
            loss.backward()
        optimizer.step()
    return [float(p.detach().pow(3).sum()) for p in model.parameters()]


CASES = [(way, second) for way in (*STEPS, "nested") for second in ((29, 6), (28, 7), (58, 12))]


def all_cases() -> list[list[float]]:
    return [trained(way, second) for way, second in CASES if (way, second) != ("joined", (58, 12))]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_the_weights_are_those_of_one_process(ranks: int) -> None:
    for found in run_ranks(all_cases, ranks, timeout_s=200):
        cases = (case for case in CASES if case != ("joined", (58, 12)))
        for (way, second), mine in zip(cases, found, strict=True):
            whole = trained(way, second, distributed=False)
            assert mine == pytest.approx(whole, rel=1e-9), (way, second)


def shuffled() -> list[list[float]]:
    """Return in which order each of three loaders gives its samples."""
    model, data = nn.Linear(1, 1), TensorDataset(torch.arange(24.0))
    torch.manual_seed(3)
    loaders = hocket.distribute(model, None, [DataLoader(data, 12, shuffle=True) for _ in range(3)])[2]
    found: list[list[float]] = []
    for loader in loaders:
        parts: list[Any] = [None] * (torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)
        found.append([])
        for (x,) in loader:
            if len(parts) > 1:
                torch.distributed.all_gather_object(parts, x.tolist())
            found[-1] += x.tolist() if len(parts) == 1 else sum(parts, [])
    return found


def test_each_shuffles_by_numbers_of_its_own_that_do_not_depend_on_ranks() -> None:
    alone = shuffled()
    assert len({tuple(one) for one in alone}) == 3
    torch.manual_seed(3)
    plain = DataLoader(TensorDataset(torch.arange(24.0)), 12, shuffle=True)
    assert alone[0] == [float(x) for batch in plain for x in batch[0]]
    assert run_ranks(shuffled, 2, timeout_s=100) == [alone, alone]


def by_trainer(several: list[DataLoader[Any]]) -> list[Any]:
    model = nn.Linear(1, 1)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1))
    return [trainer.batches(one) for one in several]


def by_calls(several: list[DataLoader[Any]]) -> list[Any]:
    """Distribute a model for each loader, as of two networks of one program."""
    models = [nn.Linear(1, 1) for _ in several]
    torch.manual_seed(3)
    return [hocket.distribute(model, None, one)[2] for model, one in zip(models, several, strict=True)]


def shuffled_by(way: Callable[[list[DataLoader[Any]]], list[Any]]) -> list[list[float]]:
    """Return in which order two loaders give their samples together, and then a third one."""
    data = TensorDataset(torch.arange(24.0), torch.zeros(24))
    several = way([DataLoader(data, 24, shuffle=True) for _ in range(3)])
    torch.manual_seed(3)
    pairs = [[one[0], other[0]] for one, other in zip(*several[:2], strict=True)]
    orders = [*pairs[0], *(batch[0] for batch in several[2])]
    if not torch.distributed.is_initialized():
        return [order.tolist() for order in orders]
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, [order.tolist() for order in orders])
    return [sum((part[i] for part in parts), []) for i in range(3)]


@pytest.mark.parametrize("way", [by_trainer, by_calls])
def test_loaders_that_are_used_together_shuffle_apart(way: Callable[[list[DataLoader[Any]]], list[Any]]) -> None:
    alone = shuffled_by(way)
    assert alone[0] == alone[2] != alone[1]
    assert run_ranks(shuffled_by, 2, way, timeout_s=100) == [alone, alone]


def test_a_list_of_batches_is_one_loader_and_a_mixture_is_refused() -> None:
    one = DataLoader(TensorDataset(torch.zeros(4, 1)))
    assert len(hocket.distribute(nn.Linear(1, 1), None, [torch.zeros(2, 1), torch.zeros(2, 1)])[2]) == 2
    with pytest.raises(TypeError, match="that at 1 is a list and no torch DataLoader"):
        hocket.distribute(nn.Linear(1, 1), None, [one, [torch.zeros(1)]])
    with pytest.raises(ValueError, match="pass one loader"):
        hocket.distribute(nn.Linear(1, 1), None, [one, one], loss_weight=len)


def by_evaluation() -> list[str]:
    model, optimizer = built()
    model, optimizer, _ = hocket.distribute(model, optimizer)
    said = []
    for x, y in hocket.shard(loader_of(12, 1)):
        x.requires_grad_(True)
        loss = cross_entropy(model(x), y)
        assert torch.autograd.grad(loss, x, retain_graph=True)[0].shape == x.shape
        with model.no_sync():
            cross_entropy(model(x), y).backward()
        loss = cross_entropy(model(x), y)
        try:
            loss.backward()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_training_with_the_batches_of_an_evaluation_is_refused() -> None:
    for said in run_ranks(by_evaluation, 2, timeout_s=100):
        assert ["pass a list of them" in words for words in said] == [True, True]


def resumed(path: str, stop: int, *, one: bool = False) -> tuple[list[float], int]:
    """Return the losses, and the exit status; the last rank is told to end after `stop` steps."""
    _preemption._EVERY_S = 0.0
    model, optimizer = built()
    given = [loader_of(22, 1, shuffle=True), loader_of(29, 2, 7, shuffle=True)]
    model, optimizer, loaders = hocket.distribute(model, optimizer, given)
    state = hocket.resume(
        path, loaders[0] if one else loaders, model=model, optimizer=optimizer, extra=lambda: {"epoch": epoch}
    )
    losses: list[float] = []
    try:
        for epoch in range(state["epoch"] if state else 0, 3):  # noqa: B007 - `extra` reads it
            for pair in zip(*loaders, strict=False):
                optimizer.zero_grad()
                each = [cross_entropy(model(x), y) for x, y in pair]
                (each[0] + each[1]).backward()
                optimizer.step()
                losses.append(float(hocket.average(each[0])) + float(hocket.average(each[1])))
                if len(losses) == stop and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                    os.kill(os.getpid(), signal.SIGUSR1)
    except SystemExit as ended:
        return losses, int(ended.code or 0)
    return losses, 0


def averaged() -> list[Any]:
    """Return averages of each batch's loss, and what is said of that of both together, and of a number."""
    model, optimizer = built()
    model, optimizer, (a, b) = hocket.distribute(model, optimizer, [loader_of(5, 1), loader_of(7, 2, 7)])
    found: list[Any] = []
    for one, other in zip(a, b, strict=True):
        each = [cross_entropy(model(x), y) for x, y in (one, other)]
        both = each[0] + each[1]
        both.backward()
        optimizer.step()
        found += [hocket.average(value).item() for value in each]
        for wrong in (both, each[0].item(), joined(model, one, other)[0]):
            try:
                hocket.average(wrong)
            except RuntimeError as error:
                found.append(str(error))
        optimizer.step()
        found.append(hocket.average((last := cross_entropy(model(one[0]), one[1])).item()))
        optimizer.step()
        model(other[0])
        found.append(hocket.average(last).item())
    return found


def test_an_average_is_by_the_samples_of_the_loss_s_own_batch() -> None:
    model, optimizer = built()
    one, other = next(iter(loader_of(5, 1))), next(iter(loader_of(7, 2, 7)))
    each = [cross_entropy(model(x), y) for x, y in (one, other)]
    (each[0] + each[1]).backward()
    optimizer.step()
    optimizer.step()
    each.append(cross_entropy(model(one[0]), one[1]))
    whole = [float(value.detach()) for value in each]
    for found in run_ranks(averaged, 2, timeout_s=100):
        assert [found[0], found[1], found[5], found[6]] == pytest.approx([*whole, whole[2]], rel=1e-9)
        assert all("of batches of several loaders" in said for said in found[2:5])


def refused(path: str) -> str:
    with pytest.raises(CheckpointError) as error:
        resumed(path, 0, one=True)
    return str(error.value)


@pytest.mark.long
def test_they_go_on_where_a_run_was_ended(tmp_path: Path) -> None:
    whole = run_ranks(resumed, 2, str(tmp_path / "whole"), 0, timeout_s=100)[0]
    path = str(tmp_path / "checkpoint")
    begun = run_ranks(resumed, 2, path, 6, timeout_s=100)[0]
    assert begun[1] == _SAVED
    for said in run_ranks(refused, 2, path, timeout_s=100):
        assert "is of 2 loaders, and resume was given 1" in said
    rest = run_ranks(resumed, 3, path, 0, timeout_s=100)[0]
    assert len(begun[0]) + len(rest[0]) == len(whole[0])
    assert begun[0] + rest[0] == pytest.approx(whole[0], rel=1e-9)


_LEFT_OPEN = """
import torch, hocket
from torch.utils.data import DataLoader, TensorDataset
_, _, loader = hocket.distribute(torch.nn.Linear(1, 1), None, DataLoader(TensorDataset(torch.zeros(8, 1))))
kept = iter(loader)
next(kept)
raise ValueError("an error of the program")
"""


@pytest.mark.long
def test_an_iterator_that_a_program_keeps_ends_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_LEFT_OPEN)
    command = [sys.executable, "-m", "hocket", "run", "-n", "1", "--no-run-dir", str(tmp_path / "program.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=deadline(60))
    assert "ValueError: an error of the program" in ended.stderr
    assert "Exception ignored" not in ended.stdout + ended.stderr
