"""Which losses are more than sums of terms of one sample each, and which are sums over samples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hocket.comm import torch_adapter
from hocket.parallel.batches import divisors
from hocket.parallel.data._coupling import (
    samples_compete,
    samples_meet,
    samples_paired,
    scale_of_means,
    sums_of_samples,
)


@given(samples=st.integers(2, 6), each=st.integers(1, 9), stacked=st.booleans())
def test_rows_of_one_sample_may_meet_and_those_of_two_may_not(samples: int, each: int, stacked: bool) -> None:
    """A sample has several rows: its tokens, side by side, or one in each of several views."""
    rows = torch.rand(samples * each, 3, dtype=torch.float64, requires_grad=True) * 1.0
    of_samples = rows.sum(1).view(each, samples).T if stacked else rows.sum(1).view(samples, each)
    assert not samples_meet(of_samples.sum(1).square().mean(), [rows], samples)
    assert samples_meet(of_samples.sum(1).mean().square(), [rows], samples)


@pytest.mark.parametrize("samples", [1, 3])
def test_nothing_is_found_where_rows_are_not_the_samples(samples: int) -> None:
    rows = torch.rand(4, requires_grad=True) * 1.0
    assert not samples_meet(rows.mean().square(), [rows], samples)


def test_nodes_of_one_graph_may_meet_and_those_of_two_may_not() -> None:
    """Four graphs have eight nodes, which are a multiple of four by chance."""
    nodes = torch.rand(8, 3, dtype=torch.float64, requires_grad=True) * 1.0
    sizes = [3, 1, 2, 2]
    graph = torch.arange(4).repeat_interleave(torch.tensor(sizes))
    means = torch.zeros(4, 3, dtype=torch.float64).index_add(0, graph, nodes) / torch.tensor(sizes)[:, None]
    assert not samples_meet(means.square().mean(), [nodes], 4)
    assert samples_meet(means.mean(0).square().mean(), [nodes], 4)
    assert samples_meet(means.square().mean() + (means[0] * means[3]).sum(), [nodes], 4)
    assert samples_meet((nodes[3:] - nodes[:-3]).square().mean(), [nodes], 4)
    graphs = [torch.rand(n, dtype=torch.float64, requires_grad=True) * 1.0 for n in (4, 8, 3, 4)]  # called one by one
    means = torch.stack([one.mean() for one in graphs])
    assert not samples_meet(means.square().mean(), graphs, 4)
    assert samples_meet(means.mean().square(), graphs, 4)


def test_what_is_ranked_within_a_sample_may_be_and_samples_may_not() -> None:
    rows = torch.rand(4, 8, dtype=torch.float64, requires_grad=True) * 1.0
    made, some = torch_adapter.graph_marks([rows]), torch.tensor([True, True, False, True])
    for ranked in (rows, rows[:, 0], rows[:, 0][some], rows.mean(1)[some]):
        assert samples_compete(ranked.max(), made, 4) == "max"
    for parts in (rows, [rows[i] for i in range(4)], [one.flatten() for one in rows.split(1)]):
        assert samples_compete(torch.stack([one.topk(2).values.mean() for one in parts]).mean(), made, 4) == ""


def _said(loss_of: Callable[[torch.Tensor], torch.Tensor]) -> tuple[str, tuple[float, ...]]:
    """Return whether a loss of four outputs is a sum over samples, and what it is found to divide by."""
    outputs = torch.rand(4, dtype=torch.float64, requires_grad=True) * 1.0
    loss = loss_of(outputs)
    return sums_of_samples(loss, torch_adapter.graph_marks([outputs]), 4), divisors(loss)


_MASK = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "summed",
    [
        lambda rows: (rows * _MASK).sum(),
        lambda rows: (rows * _MASK).sum(dim=0),
        lambda rows: (rows * (_MASK > 0)).sum(),
        lambda rows: rows @ _MASK,
        lambda rows: torch.vdot(_MASK, rows),
        lambda rows: torch.vdot(rows, _MASK),
        lambda rows: rows[None] @ _MASK[:, None],
        lambda rows: (_MASK[None] @ rows[:, None])[0, 0],
        lambda rows: (rows[None] @ _MASK)[0],
        lambda rows: torch.einsum("b,b->", rows, _MASK),
        lambda rows: torch.where(_MASK > 0, rows, torch.nan).nansum(),
    ],
)
def test_a_sum_is_known_in_whatever_form(summed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert _said(summed) == ("sum", ())
    assert _said(lambda rows: summed(rows) / _MASK.sum()) == ("", (3.0,))
    assert _said(lambda rows: summed(rows) / -_MASK.sum()) == ("", (3.0,))


@pytest.mark.parametrize(
    "summed",
    [
        lambda rows: rows.norm() ** 2,
        lambda rows: torch.linalg.vector_norm(rows, 1),
        lambda rows: torch.dist(rows, torch.zeros(4, dtype=torch.float64)).square(),
    ],
)
def test_a_norm_to_the_power_of_its_order_is_a_sum(summed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert _said(lambda rows: summed(rows - 1)) == ("sum", ())
    assert _said(lambda rows: summed(rows - 1) / _MASK.sum()) == ("", (3.0,))
    assert _said(lambda rows: summed((rows - 1) / 4))[0] == ""


def test_a_mean_is_multiplied_by_one_divided_by_a_count_and_not_by_a_share() -> None:
    outputs = torch.rand(4, dtype=torch.float64, requires_grad=True) * 1.0
    made = torch_adapter.graph_marks([outputs])
    assert scale_of_means(outputs.mean() / (_MASK > 0).sum().clamp(min=1), made, 4) == (1 / 3,)
    assert scale_of_means(outputs.mean() / _MASK.mean(), made, 4) == (1.0,)


def test_a_sum_of_one_thing_that_counts_is_one() -> None:
    assert _said(lambda rows: (rows * (torch.arange(4) == 2)).sum())[0] == "sum"


def test_what_python_adds_up_of_a_vector_of_losses_is_a_sum() -> None:
    def said(loss_of: Callable[[torch.Tensor], Any]) -> str:
        return _said(loss_of)[0]

    assert said(sum) == said(lambda rows: sum(rows) * 0.5) == said(lambda rows: rows.mean() + sum(rows)) == "sum"
    assert said(lambda rows: rows.mean() + 0.1 * sum(rows)) == "small"
    assert said(lambda rows: sum(rows) / 4) == said(lambda rows: 10 * sum(rows) / 4) == ""
    assert said(lambda rows: sum(rows) * (1 / 4)) == said(lambda rows: sum(rows[i] / 4 for i in range(4))) == ""
    assert said(lambda rows: sum(rows[:, None].expand(4, 4).mean(0))) == ""  # of four tasks


def test_a_product_of_means_is_no_sum_over_samples() -> None:
    """It goes over features."""
    ones = torch.ones(4, 1, dtype=torch.float64)
    outputs = torch.rand(4, 4, dtype=torch.float64, requires_grad=True) * 1.0
    made = torch_adapter.graph_marks([outputs])
    assert sums_of_samples(outputs.mean(0, keepdim=True) @ ones, made, 4) == ""
    assert sums_of_samples(outputs.mean(0) @ ones[:, 0], made, 4) == ""
    assert sums_of_samples(outputs.square().sum(1) @ ones[:, 0], made, 4) == "sum"


def test_losses_that_learned_weights_multiply_are_no_sum_over_samples() -> None:
    s = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def weighed(*losses: torch.Tensor) -> torch.Tensor:
        return (torch.stack(losses) * (-s).exp() + s).sum()

    assert _said(lambda rows: weighed(rows.mean(), rows.square().mean()))[0] == ""
    assert _said(lambda rows: weighed(rows.mean(), rows.square().sum()))[0] == "sum"
    assert _said(lambda rows: weighed(rows[0], rows[1].square()))[0] == "sum"
    assert _said(lambda rows: (rows.view(2, 2) * (-s).exp() + s).sum())[0] == "sum"


@pytest.mark.parametrize(
    "mean",
    [
        lambda rows: torch.where(_MASK > 0, rows, torch.nan).nanmean(),
        lambda rows: torch.masked.mean(rows, mask=_MASK > 0),
        lambda rows: torch.einsum("b,b->", rows, _MASK) / _MASK.sum(),
        lambda rows: rows[_MASK > 0].mean(dim=0),
    ],
)
def test_a_mean_over_what_is_not_left_out_tells_what_it_divides_by(
    mean: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert _said(mean) == ("", (3.0,))


@pytest.mark.parametrize(
    ("loss", "divisor"),
    [
        (lambda rows, none: (rows * none).sum() / none.sum().clamp(min=1), 0.0),
        (lambda rows, none: (rows * none).sum() / max(1, int(none.sum())), 0.0),
        (lambda rows, none: rows.masked_fill(none == 0, 0).sum() / (none.sum() + 1e-8), 0.0),
        (lambda rows, none: torch.where(none > 0, rows, 0.0).sum() / none.sum().clamp(min=1), 0.0),
        (lambda rows, none: rows[none > 0].sum() / none.sum().clamp(min=1), 0.0),
        (lambda rows, none: torch.nan_to_num(rows[none > 0].mean()), 0.0),
        (lambda rows, none: rows.sum() * 0, 0.0),
        (lambda rows, none: (rows * 0).sum(), 0.0),
        (lambda rows, none: (rows * none).sum() / len(rows), 4.0),
        (lambda rows, none: (rows[:1] * none[:1]).sum() / len(rows[:1]), 1.0),
        (lambda rows, none: (rows - 9).relu().sum() / torch.tensor(1.0), 1.0),
    ],
)
def test_where_all_is_left_out_a_loss_counts_nothing(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], divisor: float
) -> None:
    assert _said(lambda rows: loss(rows, torch.zeros_like(rows))) == ("", (divisor,))


def test_samples_meet_in_a_quotient_by_a_sum_that_is_constant() -> None:
    logits = torch.rand(4, 3, dtype=torch.float64, requires_grad=True) * 1.0
    made, right = torch_adapter.graph_marks([logits]), logits.softmax(1)
    target = torch.eye(4, 3, dtype=torch.float64)
    assert samples_paired(1 - (right * target).sum() / (right.sum() + 1), made, 4)
    assert not samples_paired((1 - (right * target).sum(1) / (right.sum(1) + 1)).mean(), made, 4)
    each = [1 - (a * b).sum() / (a.sum() + 1) for a, b in zip(right, target, strict=True)]
    assert not samples_paired(torch.stack(each).mean(), made, 4)


def test_samples_meet_in_what_is_bent_at_a_mean() -> None:
    """A second derivative is zero on both sides of the bend."""
    rows = torch.rand(4, dtype=torch.float64, requires_grad=True) * 1.0
    made = torch_adapter.graph_marks([rows])
    assert samples_paired((rows.mean() - 0.5).abs() + 0.5, made, 4)  # flooding
    assert samples_paired(rows.mean().clamp(min=0.1), made, 4)
    assert samples_paired(torch.maximum(rows.mean(), rows.square().mean()), made, 4)
    assert not samples_paired((rows - 0.5).abs().clamp(max=0.3).mean(), made, 4)
    group = torch.tensor([0, 0, 1, 1])
    here = group == 0
    assert samples_paired((rows[here].mean() - rows[~here].mean()).abs(), made, 4)
    assert not samples_paired((rows[here] - 0.5).abs().mean(), made, 4)
    indicators = torch.nn.functional.one_hot(group, 2).double()
    sums = torch.zeros(2, dtype=torch.float64).index_add(0, group, rows)
    for means in (torch.stack([rows[here].mean(), rows[~here].mean()]), indicators.T @ rows / 2, sums / 2):
        assert samples_paired(means.max(), made, 4)
        assert not samples_paired(means.mean(), made, 4)
    pairs = torch.rand(4, 2, dtype=torch.float64, requires_grad=True) * 1.0
    made = torch_adapter.graph_marks([pairs])
    assert samples_paired((pairs[:, 0].mean() - 0.5).abs(), made, 4)  # a column is no sample
    assert not samples_paired(torch.stack([(one.mean() - 0.5).abs() for one in pairs]).mean(), made, 4)


def test_soft_labels_have_no_samples_that_meet() -> None:
    logits = torch.rand(4, 3, dtype=torch.float64, requires_grad=True) * 1.0
    made = torch_adapter.graph_marks([logits])
    assert not samples_paired(torch.nn.functional.cross_entropy(logits, torch.full_like(logits, 1 / 3)), made, 4)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda rows: rows.view(4, 1).expand(4, 3).mean(0).sum(), ""),
        (lambda rows: rows.view(4, 1).expand(4, 3).sum(0).mean(), "sum"),
        (lambda rows: torch.einsum("c,c->", (rows[:, None] * torch.ones(4)).mean(0), torch.ones(4).double()), ""),
        (lambda rows: torch.stack([rows.mean(), rows.square().mean()]).sum(), ""),
        (lambda rows: torch.stack([rows.sum(), rows.mean()]).sum(), "sum"),
        (lambda rows: torch.nn.Parameter(torch.tensor(1.0)).exp() * rows.sum(), "sum"),
        (lambda rows: sum((row * torch.ones(3)).mean() for row in rows), "sum"),
        (lambda rows: sum((row * torch.ones(3)).mean() for row in rows) / 4, ""),
    ],
)
def test_sums_are_told_from_means_however_they_are_put_together(loss: Callable[..., torch.Tensor], said: str) -> None:
    assert _said(loss)[0] == said


def test_a_sum_times_a_small_number_is_told_from_a_mean() -> None:
    assert _said(lambda rows: rows.mean() + 0.01 * rows.square().sum())[0] == "small"
    assert _said(lambda rows: rows.mean() + 0.25 * rows.square().sum())[0] == ""
    assert _said(lambda rows: rows @ torch.full_like(rows, 0.25))[0] == ""
    assert _said(lambda rows: rows.view(2, 2).mean(0) @ torch.ones(2, dtype=torch.float64))[0] == ""


def test_the_scale_of_a_mean_may_have_a_parameter_in_it() -> None:
    output, weight = torch.ones(4, 2, requires_grad=True) * 3, nn.Parameter(torch.tensor(0.5))
    made = torch_adapter.graph_marks([output])
    loss = output.mean() * 0.25 + output.square().mean() * weight * 2
    assert scale_of_means(loss, made, 4) == pytest.approx((0.25, 1.0))
    assert scale_of_means(loss, made, 4, learned=False) == pytest.approx((0.25,))
