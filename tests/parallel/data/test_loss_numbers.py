"""Numbers that a program makes of a rank's own samples, at any time, and that its loss depends on, are told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.parallel.data._loss_numbers import factors, numbers_within
from hocket.testing import run_ranks

FACTOR = "multiplies its loss, or a term of it, by a number that differs from rank to rank"
NUMBER = "depends on a number that is not the same on all ranks"
SAMPLES, BATCH = 32, 8

Batch = tuple[Tensor, Tensor, Tensor]
Step = Callable[[Any, Batch, int], Tensor]


def run(step: Step, **options: Any) -> list[str]:
    """Train for four epochs; return the warnings, or the error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    draw = torch.Generator().manual_seed(1)
    x, z = (torch.randn(SAMPLES, n, generator=draw, dtype=torch.float64) for n in (6, 1))
    y = torch.randint(4, (SAMPLES,), generator=draw)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(x, y, z[:, 0]), batch_size=BATCH)
    model, optimizer, loader = hocket.distribute(model, optimizer, loader, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for epoch in range(4):
                for batch in loader:
                    optimizer.zero_grad()
                    step(model, batch, epoch).backward()
                    optimizer.step()
        except RuntimeError as error:
            return [str(error)]
    return [str(one.message) for one in caught]


def scaled_where_large(model: Any, batch: Batch, epoch: int) -> Tensor:
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    return loss * 0.1 if epoch and loss.item() > 1.35 else loss


def left_out_where_large(model: Any, batch: Batch, epoch: int) -> Tensor:
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    return loss * 0 if epoch and loss.item() > 1.35 else loss


def masked_and_scaled(model: Any, batch: Batch, epoch: int) -> Tensor:
    losses, mask = functional.cross_entropy(model(batch[0]), batch[1], reduction="none"), (batch[2] > -1).double()
    by = float(losses.mean().detach()) if epoch > 1 else 1.0
    return by * (losses * mask).sum() / mask.sum()


def weights_by_losses() -> Step:
    seen: list[list[float]] = [[0.0, 0.0] for _ in range(4)]

    def step(model: Any, batch: Batch, epoch: int) -> Tensor:
        output = model(batch[0])
        some = functional.cross_entropy(output[:, :3], batch[1] % 3), functional.mse_loss(output[:, 3], batch[2])
        for i, one in enumerate(some):
            seen[epoch][i] += one.item()
        by = [seen[epoch - 1][i] / seen[epoch - 2][i] if epoch > 1 else 1.0 for i in range(2)]
        return by[0] * some[0] + by[1] * some[1]

    return step


def weight_of_a_class(model: Any, batch: Batch, epoch: int) -> Tensor:
    target = (batch[2] > 0).double()
    by = float((1 - target).sum() / target.sum().clamp(min=1)) if epoch else 1.0
    weight = torch.tensor(by, dtype=torch.float64)
    return functional.binary_cross_entropy_with_logits(model(batch[0])[:, 0], target, pos_weight=weight)


def limit_of_a_loss(model: Any, batch: Batch, epoch: int) -> Tensor:
    off = model(batch[0])[:, 0] - batch[2]
    delta = 0.5 * float(off.detach().abs().max()) if epoch else 0.7
    return functional.huber_loss(off, torch.zeros_like(off), delta=delta)


def summed(model: Any, batch: Batch, epoch: int) -> Tensor:
    loss = functional.cross_entropy(model(batch[0]), batch[1], reduction="sum") / hocket.total(len(batch[0]))
    return loss * float(batch[2].var()) if epoch else loss


def counted(batch: Any) -> Tensor:
    return (batch[2] > -1).sum()


def told() -> list[list[str]]:
    return [
        run(scaled_where_large),
        run(left_out_where_large),
        run(masked_and_scaled),
        run(weights_by_losses()),
        run(masked_and_scaled, loss_weight=counted),
        run(summed, loss_reduction="sum"),
        run(weight_of_a_class),
        run(limit_of_a_loss),
    ]


def scaled_alike(model: Any, batch: Batch, epoch: int) -> Tensor:
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    return loss * 0.1 if epoch and hocket.average(loss.detach()) > 1.35 else loss


def weighted_samples(model: Any, batch: Batch, epoch: int) -> Tensor:
    losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return torch.stack([float(by) * one for by, one in zip(batch[2].abs(), losses, strict=True)]).mean()


def added_up(model: Any, batch: Batch, epoch: int) -> Tensor:
    output = model(batch[0])
    parts = [float(batch[2][i]) * functional.cross_entropy(output[i], batch[1][i]) for i in range(len(output))]
    return torch.as_tensor(sum(parts)) / len(output)


def term_of_some(model: Any, batch: Batch, epoch: int) -> Tensor:
    output = model(batch[0])
    loss, some = functional.cross_entropy(output, batch[1], reduction="sum") / len(output), batch[2] > 1
    return loss + 0.1 * (output.square().sum(1) * some).sum() / len(output) if some.any() else loss


def mean_by_mean(model: Any, batch: Batch, epoch: int) -> Tensor:
    losses, mask = functional.cross_entropy(model(batch[0]), batch[1], reduction="none"), (batch[2] > -0.5).double()
    return (losses * mask).mean() / mask.mean()


def masked(model: Any, batch: Batch, epoch: int) -> Tensor:
    losses, mask = functional.cross_entropy(model(batch[0]), batch[1], reduction="none"), (batch[2] > -1).double()
    return (0.5 + 0.1 * epoch) * (losses * mask).sum() / int(mask.sum())


def silent() -> list[list[str]]:
    steps = [scaled_alike, weighted_samples, added_up, term_of_some, mean_by_mean, masked]
    return [*map(run, steps), run(masked, loss_weight=counted)]


@pytest.mark.long
def test_numbers_of_a_ranks_own_samples_are_told() -> None:
    first, second = run_ranks(told, 2, timeout_s=100)
    for said, other, words in zip(first, second, [FACTOR] * 6 + [NUMBER] * 2, strict=True):
        assert [words in one for one in said] == [True], said
        assert not other


@pytest.mark.long
def test_right_losses_are_not_warned_of() -> None:
    for said in run_ranks(silent, 2, timeout_s=100):
        assert not any(said)


def with_three() -> tuple[list[list[str]], list[list[str]]]:
    """As above, of batches that three ranks share as 3, 3 and 2 samples."""
    steps = [weights_by_losses(), weight_of_a_class]
    return [*map(run, steps)], [*map(run, [scaled_alike, mean_by_mean, masked])]


@pytest.mark.long
def test_ranks_that_share_a_batch_equally_are_compared() -> None:
    (first, right), *others = run_ranks(with_three, 3)
    for said, words in zip(first, [FACTOR, NUMBER], strict=True):
        assert [words in one for one in said] == [True], said
    assert not any(right)
    assert not any(any(said) for both in others for said in both)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda rows: 0.5 * rows.mean() + rows.square().mean() / 4, [0.5, 0.25]),
        (lambda rows: 0.5 * rows.sum() / rows.detach().gt(0).sum(), [0.5]),
        (lambda rows: rows.mean() * 0.0, [0.0]),
        (lambda rows: rows.sum(), []),
        (lambda rows: sum(row.sum() * 0.1 for row in rows) / 4, []),
    ],
)
def test_factors_of_a_loss_are_those_of_its_terms(loss: Callable[[Tensor], Tensor], expected: list[float]) -> None:
    assert factors(loss(torch.ones(4, 3, requires_grad=True) * 2), 4) == pytest.approx(expected)


def test_numbers_within_a_loss_are_compared_if_it_is_of_the_same_form() -> None:
    rows = torch.ones(4, 3, requires_grad=True) * 2
    found = [numbers_within((rows * by).clamp(max=1).mean(), set(), 4) for by in (0.5, 0.5, 0.7)]
    other = numbers_within((rows * 0.5).mean(), set(), 4)
    assert found[0] == found[1] != found[2]
    first, _, last, unlimited = (one or (0.0, 0.0) for one in (*found, other))
    assert first[0] == last[0] != unlimited[0]
    assert numbers_within(torch.stack([row.sum() * 0.3 for row in rows]).mean(), set(), 4) is None


def test_weights_of_as_many_classes_as_samples_are_numbers_of_a_loss() -> None:
    rows, target = torch.ones(4, 4, requires_grad=True) * 2, torch.tensor([0, 1, 1, 3])
    one, other = (
        numbers_within(functional.cross_entropy(rows, target, weight=torch.tensor(by)), set(), 4)
        for by in ([1.0, 2.0, 1.0, 1.0], [1.0, 1.0, 3.0, 1.0])
    )
    assert one is not None
    assert other is not None
    assert one[0] == other[0]
    assert one[1] != other[1]


class OwnLoss(nn.Module):
    """Computes its loss itself, and divides it by what the loop says, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4).double()

    def forward(self, x: Tensor, y: Tensor, count: Any) -> Tensor:
        loss: Tensor = functional.cross_entropy(self.layer(x), y, reduction="sum") / count
        return loss


def divided_by_a_count(total: bool, reduction: str) -> tuple[list[float], list[str]]:
    """The losses, and what is said, where the loop counts the labels of a rank, or those of all ranks."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 6, generator=draw, dtype=torch.float64), torch.randint(4, (32,), generator=draw)
    y[::3] = -100
    own: Any = OwnLoss()
    optimizer: Any = torch.optim.SGD(own.parameters(), 0.1)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=8)
    model, optimizer, loader = hocket.distribute(own, optimizer, loader, loss_reduction=reduction)
    losses = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            for rows, labels in loader:
                count = int((labels != -100).sum())
                loss = model(rows, labels, int(hocket.total(count)) if total else count)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(hocket.total(loss.detach())))
        except RuntimeError as error:
            return [], [str(error)]
    return losses, [str(one.message) for one in said if FACTOR in str(one.message)]


def test_a_count_that_a_loop_gives_to_the_model_is_that_of_all_ranks() -> None:
    (alone,) = run_ranks(divided_by_a_count, 1, True, "sum", timeout_s=120)
    for losses, said in run_ranks(divided_by_a_count, 2, True, "sum", timeout_s=120):
        assert losses == pytest.approx(alone[0], rel=1e-9)
        assert not said
    for _, (refused,) in run_ranks(divided_by_a_count, 2, False, "mean", timeout_s=120):
        assert "num_items_in_batch" in refused
    (_, (told,)), (_, none) = run_ranks(divided_by_a_count, 2, False, "sum", timeout_s=120)
    assert "divide by hocket.total of their number" in told
    assert not none
