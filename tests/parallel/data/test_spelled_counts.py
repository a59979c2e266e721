"""A sum is divided by a count in many spellings: each is the loss of one process, or is told of."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.testing import run_ranks

CONSTANTS = (2, 4, 20, 0.5, 0.3, 3.0)
SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked": lambda losses, mask: (losses * mask).sum(),
    "filled": lambda losses, mask: losses.masked_fill(~mask, 0.0).sum(),
    "dot": lambda losses, mask: losses.flatten() @ mask.double().flatten(),
    "einsum": lambda losses, mask: torch.einsum("bt,bt->", losses, mask.double()),
    "chosen": lambda losses, mask: losses[mask].sum(),
}
SPELLED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "/ n": lambda total, n: total / n,
    "* (1 / n)": lambda total, n: total * (1 / n),
    "(1 / n) *": lambda total, n: (1 / n) * total,
    ".mul(1 / n)": lambda total, n: total.mul(1 / n),
    "* n**-1": lambda total, n: total * n**-1,
    "* (0.3 / n)": lambda total, n: total * (0.3 / n),
    "/ float(n)": lambda total, n: total / float(n),
    "/ tensor(n)": lambda total, n: total / torch.tensor(n),
}


def made(seed: int) -> tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return a random spelling, and the loss of outputs, classes and a mask."""
    rng = random.Random(seed)
    sum_, spelled, by = rng.choice([*SUMS]), rng.choice([*SPELLED]), rng.choice(["samples", "counted"])
    inside, outside = rng.choice(CONSTANTS), rng.choice(CONSTANTS)
    within, beyond = rng.choice(["", "/", "*"]), rng.choice(["", "/", "*"])
    of, each = rng.choice(["entropies", "squares"]), rng.random() < 0.3

    def loss(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        entropies = F.cross_entropy(output.transpose(1, 2), target, reduction="none")
        losses, n = output.square().sum(2) if of == "squares" else entropies, len(mask)
        n = n if by == "samples" else max(1, int(mask.sum()))
        total = SUMS[sum_](SPELLED[spelled](losses, n) if each else losses, mask)
        total = total / inside if within == "/" else total * inside if within == "*" else total
        total = total if each else SPELLED[spelled](total, n)
        return total / outside if beyond == "/" else total * outside if beyond == "*" else total

    spelling = f"{spelled} of {by} {'each' if each else 'together'} {beyond}{outside if beyond else ''}"
    return f"{sum_} of {of} {within}{inside if within else ''} {spelling}", loss


def fit(seed: int, size: int) -> tuple[list[float], list[str]]:
    """Train for three steps; return the weights, and what was told or raised."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(size * 3, 5, 6, generator=draw, dtype=torch.float64)
    y = torch.randint(4, x.shape[:2], generator=draw)
    mask = torch.arange(5) < torch.randint(1, 6, (len(x), 1), generator=draw)
    mask[size - 1] = mask[2 * size] = False  # nothing counts in a rank's only sample, perhaps
    torch.manual_seed(0)
    model: Any = nn.Linear(6, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(x, y, mask), batch_size=size)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model, optimizer, loader = hocket.distribute(model, optimizer, loader)
        try:
            for one, *rest in loader:
                optimizer.zero_grad()
                made(seed)[1](model(one), *rest).backward()
                optimizer.step()
        except RuntimeError as error:
            return [], [str(error)]
    return weights_of(model), [str(one.message) for one in told]


def fits(seeds: list[int], size: int) -> list[tuple[list[float], list[str]]]:
    return [fit(seed, size) for seed in seeds]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("ranks", "size"), [(2, 7), pytest.param(3, 10, marks=pytest.mark.long)])
def test_a_sum_that_is_divided_by_a_count_is_that_of_one_process_however_spelled(ranks: int, size: int) -> None:
    """`sum / 2 * (1 / len(batch))` was weighted by 2 on each rank: 1.4e-1 off, and silent."""
    seeds = list(range(48))
    alone, found = fits(seeds, size), run_ranks(fits, ranks, seeds, size, timeout_s=110)
    for seed, (weights, _), *each in zip(seeds, alone, *found, strict=True):
        if each[0][0]:
            assert each[0][0] == pytest.approx(weights, rel=1e-9, abs=1e-12), (seed, made(seed)[0], each[0][1])
        else:
            assert all(said for _, said in each), (seed, made(seed)[0])
    assert sum(bool(found[0][seed][0]) for seed in seeds) > 36  # few are refused


def begun(x: torch.Tensor, some: torch.Tensor, batch_size: int) -> tuple[Any, Any, Any]:
    """Return a layer, its optimizer and a loader, as `hocket.distribute` gives them."""
    torch.manual_seed(0)
    model: Any = nn.Linear(6, 4).double()
    loader = DataLoader(TensorDataset(x, some), batch_size=batch_size)
    return hocket.distribute(model, torch.optim.SGD(model.parameters(), 0.1), loader)


def weights_of(model: Any) -> list[float]:
    return [w for p in model.parameters() for w in p.detach().flatten().tolist()]


def two_terms(ranks_samples: int) -> list[float]:
    """Train one step with two sums that are divided by 2, which is how many samples rank 0 has, and by a count."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(ranks_samples, 5, 6, generator=draw, dtype=torch.float64)
    mask = torch.rand(ranks_samples, 5, generator=draw) < 0.7
    model, optimizer, loader = begun(x, mask, ranks_samples)
    with warnings.catch_warnings(action="ignore"):
        for one, kept in loader:
            output = model(one)
            sums = (output.square().sum(2) * kept).sum() - 0.01 * (output.softmax(2)[..., 0] * kept).sum()
            (sums / 2 * (1 / int(kept.sum()))).backward()
            optimizer.step()
    return weights_of(model)


def test_a_constant_that_is_how_many_samples_a_rank_has_is_no_count() -> None:
    """The terms of that rank were taken for one: 8.0e-2 off, and silent."""
    assert run_ranks(two_terms, 2, 3)[0] == pytest.approx(two_terms(3), rel=1e-9)


def masked_at_first(divided: bool) -> list[float] | str:
    """Train two steps with a loss of which nothing counts in the first; return the weights, or what was raised."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, generator=draw, dtype=torch.float64)
    mask = torch.arange(8) > 4
    model, optimizer, loader = begun(x, mask, 4)
    for one, kept in loader:
        optimizer.zero_grad()
        loss = (model(one).square().sum(1) * kept).sum()
        try:
            (loss / kept.sum().clamp(min=1) if divided else loss).backward()
        except RuntimeError as error:
            return str(error)
        optimizer.step()
    return weights_of(model)


def test_a_sum_is_refused_where_nothing_counts_in_the_first_batch() -> None:
    """It shows nothing, and no other batch was looked at: 5.9e-1 off, and silent."""
    for said in run_ranks(masked_at_first, 2, False):
        assert isinstance(said, str)
        assert "the loss is a sum over samples" in said
    for weights in run_ranks(masked_at_first, 2, True):
        assert weights == pytest.approx(masked_at_first(True), rel=1e-9)


def weighted_by_one() -> list[float]:
    """Train three steps with a sum of chosen samples that is divided by all elements, and of which a factor is 1."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(21, 6, generator=draw, dtype=torch.float64)
    chosen = torch.arange(21) % 7 < 4  # none of a rank's
    model, optimizer, loader = begun(x, chosen, 7)
    for one, some in loader:
        optimizer.zero_grad()
        output = model(one)
        (1.0 * output.square()[some].sum() / output.numel()).backward()
        optimizer.step()
    return weights_of(model)


def test_a_factor_of_one_is_no_count_of_nothing() -> None:
    """It was taken for that of a rank of which nothing counts: weights were 7.5e-2 off, and silent."""
    assert run_ranks(weighted_by_one, 2)[0] == pytest.approx(weighted_by_one(), rel=1e-9)


def told_of_sums() -> list[str]:
    """Return what is told where two of three ranks have a sample, of a sum and of one that is divided by a constant."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    said = []
    for constant in (1, 3):
        model: Any = nn.Linear(6, 4).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(TensorDataset(x), batch_size=2))
            for (one,) in loader:
                total = model(one).square().sum()
                (total if constant == 1 else total / constant).backward()
                optimizer.step()
        said.append(" ".join(str(one.message) for one in told))
    return said


def test_sums_are_told_of_where_ranks_have_one_sample_or_none() -> None:
    """A rank without samples knew nothing of them, and nothing was told: 6.7e-1 off."""
    raw, divided = run_ranks(told_of_sums, 3)[0]
    assert "each rank has one sample" in raw
    assert "the loss divides by 3 on every rank" in divided


RAW: dict[str, Callable[[Tensor], Tensor]] = {
    "trace": lambda errors: torch.trace(errors @ errors.T),
    "norms": lambda errors: errors.norm() * errors.norm(),
}


def fit_squares(sum_: str, divided: bool) -> tuple[list[float], list[str]]:
    """Return what an epoch with a sum of squares leaves, and what is told."""
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(14, n, generator=draw, dtype=torch.float64) for n in (6, 4))
    model, optimizer, loader = begun(x, y, 7)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for one, target in loader:
            optimizer.zero_grad()
            total = RAW[sum_](model(one) - target)
            (total / len(one) if divided else total).backward()
            optimizer.step()
    return weights_of(model), [str(one.message) for one in told if "rank" in str(one.message)]


def said_of_squares(sum_: str) -> str:
    """Return the error where such a sum is not divided."""
    with pytest.raises(RuntimeError) as refused:
        fit_squares(sum_, False)
    return str(refused.value)


@pytest.mark.parametrize("sum_", RAW)
def test_sums_of_squares_by_a_trace_or_a_product_of_norms_are_sums(sum_: str) -> None:
    """They were 3e-1 off, and silent, and told of where they are divided by `len(batch)`, which is right."""
    assert "the loss is a sum over samples" in run_ranks(said_of_squares, 2, sum_)[0]
    weights, told = run_ranks(fit_squares, 2, sum_, True)[0]
    assert weights == pytest.approx(fit_squares(sum_, True)[0], rel=1e-9)
    assert not told


def told_of_added_losses(constant: float) -> list[str]:
    """Return what is told where Python adds up the losses of a batch, and divides by a constant, or by their number."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    said = []
    for apart in (False, True):
        model, optimizer, loader = begun(x, x.roll(1, 0)[:, :4], 8)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for one, target in loader:
                output = model(one)
                pairs = zip(output, target, strict=True)
                losses: Any = [F.mse_loss(*pair) for pair in pairs] if apart else (output - target).square().mean(1)
                (sum(losses) / (constant or len(losses))).backward()
                optimizer.step()
        said.append(" ".join(str(one.message) for one in told if "rank" in str(one.message)))
    return said


def test_losses_that_python_adds_up_and_divides_by_a_constant_are_told_of() -> None:
    """By the size of the global batch: half of the update of one device on two ranks, and silent."""
    assert all("the size of the global batch" in said for said in run_ranks(told_of_added_losses, 2, 8.0)[0])
    assert not any(run_ranks(told_of_added_losses, 2, 0.0)[0])


def told_of_traces() -> list[str]:
    """Return what is told of a trace that is divided by all elements, which are as many on every rank."""
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model, optimizer, loader = begun(x, x[:, :4], 8)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for one, target in loader:
            errors = (model(one) - target)[:, :3]
            (torch.trace(errors @ errors.T) / errors.numel()).backward()
            optimizer.step()
    return [str(one.message) for one in told if "rank" in str(one.message)]


def test_a_trace_that_is_divided_by_elements_is_not_told_of() -> None:
    assert not run_ranks(told_of_traces, 2)[0]
