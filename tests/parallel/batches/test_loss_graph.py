"""What the graph of a loss tells it divides by."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.parallel.batches import divisors, guarded, is_one_by_one

TARGET = torch.tensor([0, 2, -100, 1])
SCALE, WEIGHT = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.rand(3, 5))


def counted(output: Tensor) -> Tensor:
    """A mean over three of four samples."""
    return F.cross_entropy(output, TARGET)


@pytest.mark.parametrize(
    ("loss", "counts"),
    [
        (lambda output: counted(output) + 0.1 * WEIGHT.square().sum(), (3.0,)),
        (lambda output: counted(output) + sum(one.norm() for one in (WEIGHT, SCALE)), (3.0,)),
        (lambda output: counted(output) + 0.1 * (WEIGHT - torch.ones(3, 5)).abs().mean(), (3.0,)),
        (lambda output: counted(output) + (WEIGHT @ WEIGHT.T - torch.eye(3)).square().sum(), (3.0,)),
        (lambda output: torch.exp(-SCALE) * counted(output) + SCALE, (3.0,)),
        (lambda output: counted(output) / (2 * SCALE**2) + SCALE.log(), (3.0,)),
        (lambda output: counted(output) + ((torch.rand(4, 5) @ WEIGHT.T) ** 2).mean(), (3.0, 12.0)),
        (lambda output: counted(output) + ((torch.rand(4, 3, 5) - WEIGHT) ** 2).mean(), (3.0, 60.0)),
        (lambda output: torch.stack([counted(output), output.square().mean()]).mean(), (3.0, 12.0)),
        (lambda output: torch.stack([counted(output), counted(output)]) @ torch.tensor([0.2, 0.8]), (3.0, 3.0)),
        (lambda output: (torch.stack([counted(output)] * 3) * WEIGHT[:, 0].softmax(0)).sum(), (3.0, 3.0, 3.0)),
        (lambda output: (torch.stack([counted(output), output.mean()]) * WEIGHT[:2, 0] + SCALE).sum() / 2, (3.0, 12.0)),
        (lambda output: torch.cat([counted(output)[None], counted(output)[None]]).mean(), (3.0, 3.0)),
        (lambda output: output.square().mean(0).mean(), (12.0,)),
        (lambda output: (output * (TARGET >= 0)[:, None]).mean() / (TARGET >= 0).float().mean(), (9.0,)),
        (lambda output: counted(output) + output.sum() * 0, (3.0, 0.0)),
        (lambda output: (output.sum(0) / torch.tensor([4.0, 3.0, 2.0])).mean(), (4.0, 3.0, 2.0)),
        (lambda output: counted(output).mean(), (3.0,)),
        (lambda output: counted(output)[None].sum() + output.square().mean().mean(), (3.0, 12.0)),
        (lambda output: torch.stack([counted(output)]).mean(), (3.0,)),
        (lambda output: torch.stack([output.square().sum() / 4]).sum(), (4.0,)),
        (lambda output: output[:, :1].square().mean(0).mean(), (4.0,)),
    ],
)
def test_terms_tell_what_they_divide_by(loss: Callable[[Tensor], Tensor], counts: tuple[float, ...]) -> None:
    """Penalties of weights, learned factors, and losses that are put together before they are added up."""
    output = torch.rand(4, 3, requires_grad=True) * 1.0
    assert divisors(loss(output), samples=4) == pytest.approx(counts)


def test_losses_of_single_samples_are_told_from_those_of_tasks() -> None:
    output, lengths = torch.rand(4, 5, 3, requires_grad=True) * 1.0, (2, 5, 1, 3)
    ragged = [row[:length].square().mean() for row, length in zip(output, lengths, strict=True)]
    assert is_one_by_one(torch.stack(ragged).mean(), 4) or divisors(torch.stack(ragged).mean(), 4) == (4.0,)
    assert is_one_by_one(sum(ragged, torch.zeros(())) / 4, 4)
    tasks = [output[:, k].square().mean() for k in range(5)]
    assert not is_one_by_one(sum(tasks, torch.zeros(())), 4)


def _all(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target, reduction="sum")


def _shared(output: Tensor, target: Tensor) -> Tensor:
    """Classes, and boxes where there is an object, divided by objects."""
    objects = target.sum().clamp(min=1)
    return output.square().sum() / objects + (output - 1)[target > 0].abs().sum() / objects


class Mul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def test_a_program_s_own_function_is_not_taken_for_torch_s_of_that_name() -> None:
    loss = Mul.apply(torch.rand(4, 3, requires_grad=True).mean(), 0.5)
    assert divisors(loss, samples=4) == ()


@pytest.mark.parametrize(
    "taken", [lambda output: output[0], lambda output: output[:1], lambda output: next(iter(output))]
)
def test_the_mean_over_a_rank_s_one_sample_divides_by_samples(taken: Callable[[Tensor], Tensor]) -> None:
    """`torch.stack([loss of each]).mean()`, where the batch is one sample of three elements."""
    output = torch.rand(1, 3, requires_grad=True) * 1.0
    assert divisors(torch.stack([taken(output).square().mean()]).mean(), samples=1) == (1.0,)


@pytest.mark.parametrize(
    ("loss", "positives", "guard"),
    [
        (lambda output, target: _all(output, target) / target.sum().clamp(min=1), 0, True),
        (lambda output, target: _all(output, target) / max(1, int(target.sum())), 0, True),
        (_shared, 0, True),
        (lambda output, target: _all(output, target) / 2 / max(1, int(target.sum())) / 4, 0, True),
        (lambda output, target: (output * target).sum() / 2 / target.sum().clamp(min=1) / 4, 5, False),
        (lambda output, target: (output - 1)[target > 0].sum() / max(1, int(target.sum())), 0, True),
        (lambda output, target: _all(output, target) / target.sum().clamp(min=1), 1, False),
        (lambda output, target: _all(output, target) / target.sum().clamp(min=1), 5, False),
        (lambda output, target: (output * target).sum() / target.sum().clamp(min=1), 1, False),
        (lambda output, target: (output - 1)[target > 0].sum() / max(1, int(target.sum())), 1, False),
        (lambda output, target: output.square().sum() / target.sum().clamp(min=1), 0, None),
        (lambda output, target: output.square().sum() / target.sum().clamp(min=1), 1, None),
        (lambda output, target: _all(output, target) / target.sum().clamp(min=1) + output.mean(), 0, None),
    ],
)
def test_one_that_stands_for_nothing_is_told_from_one(
    loss: Callable[[Tensor, Tensor], Tensor], positives: int, guard: bool | None
) -> None:
    output, target = torch.rand(4, 3, requires_grad=True) * 1.0, torch.zeros(12)
    target[:positives] = 1
    assert guarded(loss(output, target.reshape(4, 3)), 4) is guard


@pytest.mark.parametrize("samples", [1, 3])
def test_losses_of_images_are_told_from_sums_over_a_batch(samples: int) -> None:
    """RetinaNet divides each image's sum by its objects, and their sum by the images; SSD divides by all objects."""
    output = torch.rand(samples, 4, requires_grad=True) * 1.0
    own = [(image[image > -1].square().sum() / (2 + i), image.sum() / 3) for i, image in enumerate(output)]
    each = sum((one + other for one, other in own), torch.zeros(()))
    assert is_one_by_one(each / samples, samples)
    of_all = sum((image[image > -1].square().sum() for image in output), torch.zeros(()))
    assert not is_one_by_one(of_all / 5, samples)
    assert not is_one_by_one(torch.stack([image.square().sum() for image in output]).sum() / 5, samples)


def test_one_sample_of_which_nothing_counts_may_be_divided_by_their_number() -> None:
    """It counted nothing, and the other rank's sample all: the loss of the batch was twice as large."""
    output = torch.zeros(3, 5, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(output, torch.full((3,), -100), reduction="sum") / 1
    assert divisors(loss, 1) == (1.0,)
    assert guarded(loss, 1)
    assert divisors(loss, 3) == (0.0,)


def test_one_sample_that_is_masked_counts_nothing_where_the_mask_is_counted() -> None:
    """Ranks of one sample each: the loss of those that count was that of all ranks' mean, by half too small."""
    output, mask = torch.rand(1, 5, requires_grad=True) * 1.0, torch.tensor([False])
    loss = (output.sum(1) * mask).sum() / mask.sum().clamp(min=1)
    assert divisors(loss, 1) == (0.0,)
    assert divisors(loss / 4, 1) == (0.0,)
    assert divisors((output.sum(1) * ~mask).sum() / (~mask).sum(), 1) == (1.0,)


CONSTANTS: tuple[float | Tensor, ...] = (2, 3.0, 0.5, 4, 30, 1.62, 7, torch.tensor(2.5))


def _term(rng: random.Random, values: Tensor, mask: Tensor) -> Tensor:
    """A sum over samples, with or without a constant of its own."""
    found = rng.choice([values.square(), values.abs() * 1.0, (values - 1).square()]).sum((1, 2)) @ mask
    by = rng.choice(CONSTANTS)
    return rng.choice([lambda: found, lambda: found / by, lambda: found * by, lambda: found / by / 3])()


def _expression(seed: int, values: Tensor, mask: Tensor) -> Tensor:
    """Sums that are divided by one count, each by itself or all together, with constants inside and outside."""
    rng = random.Random(seed)
    kind = rng.choice(["samples", "elements", "mask"])
    kept = mask if kind == "mask" else torch.ones_like(mask)
    count = {"samples": len(values), "elements": values.numel(), "mask": mask.sum()}[kind]
    sums = [_term(rng, values, kept) for _ in range(rng.randint(1, 3))]
    loss = torch.stack([one / count for one in sums]).sum() if rng.random() < 0.3 else sum(sums[1:], sums[0]) / count
    if kind == "samples" and rng.random() < 0.3:
        loss = loss + 0.1 * values.sum((1, 2)).mean() / rng.choice(CONSTANTS)
    by = rng.choice(CONSTANTS)
    return rng.choice([lambda: loss, lambda: loss / by, lambda: loss * by, lambda: loss / by / 2])()


@pytest.mark.parametrize("sizes", [(4, 3), (5, 1, 1), (6, 7, 4)])
def test_parts_weighted_by_what_their_loss_divides_by_add_up_to_that_of_all(sizes: tuple[int, ...]) -> None:
    """Constants that a sum is divided by inside of a count, as 2 sigma squared in that of a flow, are no counts."""
    numbers = torch.Generator().manual_seed(0)
    for seed in range(150):
        values = torch.rand(sum(sizes), 3, 5, generator=numbers, dtype=torch.float64).requires_grad_() * 1.0
        mask = (torch.rand(len(values), generator=numbers) < 0.6).double()
        mask[torch.tensor([0, *sizes]).cumsum(0)[:-1]] = 1.0  # something counts in each part
        losses = [_expression(seed, *some) for some in zip(values.split(sizes), mask.split(sizes), strict=True)]
        counts = [divisors(loss, size) for loss, size in zip(losses, sizes, strict=True)]
        assert all(len(some) == len(counts[0]) > 0 for some in counts)
        for weights in zip(*counts, strict=True):  # all terms have the same shares
            combined = sum(w * float(loss.detach()) for w, loss in zip(weights, losses, strict=True)) / sum(weights)
            assert combined == pytest.approx(float(_expression(seed, values, mask).detach()), rel=1e-9), seed
