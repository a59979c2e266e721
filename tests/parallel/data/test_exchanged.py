"""What is computed with other choices of a rank's samples, in one process; test_drift.py has ranks."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

from hocket.parallel.batches import BatchShard
from hocket.parallel.data._exchanged import ExchangedSamples

Order = Callable[[torch.Tensor], torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Together = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def off(order: Order, loss_of: Loss, samples: int = 8) -> float:
    """Return how far a loss is found to be from a sum of one term a sample, where the program orders samples first."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(samples, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    weights = torch.eye(3, dtype=torch.float64, requires_grad=True)
    look = ExchangedSamples()
    look.follow([x, y], samples)
    look.begin()
    try:
        at = order(y[:, 0])
        inputs, target = x[at], y[at]
        look.end()  # as of the model's forward pass
        output = inputs @ weights
        look.given([inputs], samples)
        look.follow([output], samples)
        look.begin()
        loss = loss_of(output, target)
    finally:
        look.end()
    return look.meet(loss, samples, stated=False)


@pytest.mark.parametrize(
    "order",
    [
        lambda y: torch.arange(8),
        lambda y: y.argsort(),
        lambda y: torch.from_numpy(y.numpy().argsort()),
        lambda y: torch.tensor([3, 1, 0, 2, 7, 6, 5, 4]),
    ],
)
def test_the_order_of_samples_is_no_matter(order: Order) -> None:
    """Programs sort by length before they pack; what the loader gave has another order than outputs then."""
    assert off(order, F.mse_loss) == 0
    assert off(order, lambda output, y: F.mse_loss(output / output.detach().std(), y)) > 0.01


def test_others_that_divide_by_nothing_say_nothing() -> None:
    """Errors divided by demands, of which one choice of samples has none."""

    def relative(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        demand = (y[:, 0] - max(y[0, 0].item(), y[4, 0].item())).clamp(min=0)
        assert demand.any()
        return (output[:, 0] - demand).abs().sum() / demand.sum()

    assert off(lambda y: torch.arange(8), relative) == 0


@pytest.mark.parametrize("strict", [True, False])
def test_a_choice_by_a_median_is_found_where_others_choose_nothing(strict: bool) -> None:
    """Samples with small losses, say: of many alike none is below their median; 2.3e-1 off, and silent."""

    def small(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = (output - y).square().mean(1)
        known, median = losses.detach(), losses.detach().median()
        chosen = known < median if strict else known <= median
        return (losses * chosen).sum() / chosen.sum()

    assert off(lambda y: torch.arange(8), small) > 0.01


def test_errors_relative_to_the_deviation_of_few_targets_are_found() -> None:
    """One of four choices of samples has none: 1.0e-1 off with three samples on each rank, and silent."""

    def unexplained(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (output - y).square().sum() / (y - y.mean(0)).square().sum()

    for samples in (3, 4, 8):
        assert off(lambda y: torch.arange(len(y)), unexplained, samples) > 0.01


@pytest.mark.parametrize("threshold", [1.2, 0.9, 0.5])
def test_a_mask_of_which_other_choices_have_nothing_is_no_statistic(threshold: float) -> None:
    """One, two or three samples are above it."""

    def large(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        chosen = y[:, 0] > threshold
        return ((output - y).square().mean(1) * chosen).sum() / chosen.sum().clamp(min=1)

    assert off(lambda y: torch.arange(8), large) == 0


def test_a_statistic_of_targets_is_found_where_samples_keep_their_order() -> None:
    assert off(lambda y: torch.arange(8), lambda output, y: F.mse_loss(output, y / y.std())) > 0.01


def test_a_quantile_of_what_counts_in_the_batch_is_found() -> None:
    """As many count as samples say, so that other choices of them have more or fewer (tokens of texts)."""

    def hardest(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses, counts = (output - y).square(), y > 0
        chosen = (counts & (losses >= torch.quantile(losses.detach()[counts], 0.7))).double()
        return (losses * chosen).sum() / chosen.sum()

    def of_each(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses, counts = (output - y).square(), (y > 0).double()
        chosen = counts * (losses >= torch.quantile(losses.detach(), 0.7, dim=1, keepdim=True))
        return (losses * chosen).sum() / chosen.sum()

    assert off(lambda y: torch.arange(8), hardest) > 0.01
    assert off(lambda y: torch.arange(8), of_each) == 0


def test_a_statistic_is_found_in_a_loss_of_terms_that_divide_by_different_counts() -> None:
    """A mean over elements and one over features: with two samples the deviation has no second derivative."""

    def spread(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, y) + F.relu(3 - output.var(0).sqrt()).mean()

    def norms(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, y) + output.norm(dim=1).mean()

    assert off(lambda y: torch.arange(8), spread) > 0.01
    assert off(lambda y: torch.arange(8), norms) == 0


@pytest.mark.parametrize(
    ("chosen", "right"),
    [
        (lambda x, each: x[each > 0.5], True),
        (lambda x, each: x[each.argsort()], True),
        (lambda x, each: x[:3], True),
        (lambda x, each: x + 0.1 * each[:, None], True),
        (lambda x, each: x[each.topk(3).indices], False),
        (lambda x, each: (x - x.mean(0)) / x.std(0), False),
    ],
)
def test_what_a_model_is_given_is_chosen_by_each_sample_alone(chosen: Loss, right: bool) -> None:
    """Hard samples are chosen by a first pass without gradients, or inputs are normalised by the loop."""
    x = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    look = ExchangedSamples()
    look.follow([x], 8)
    look.begin()
    try:
        given = chosen(x, x.square().sum(1))
    finally:
        look.end()
    look.given([given], 8)
    assert (look.meet(F.mse_loss(given, given + 1), 8) == 0) is right


@pytest.mark.parametrize("meet", [False, True])
def test_a_statistic_is_found_in_a_thousandth_of_the_loss(*, meet: bool) -> None:
    """In float32, whose roundings hide it in the whole loss: the balance of experts, and a mean beside it."""
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0)).unbind()
    look = ExchangedSamples()
    look.next(object(), 8)
    look.sizes.begin_batch(BatchShard.of(16, 2, 0))
    look.follow([x.requires_grad_(), y], 8)
    look.begin()
    try:
        share = (3 * x).softmax(1)
        used = F.one_hot(share.argmax(1), 4).float()
        term = (used.mean(0) * share.mean(0)).sum() if meet else (used * share).sum(1).mean()
        loss = F.mse_loss(x, y) + 1e-3 * term
    finally:
        look.end()
    assert (look.meet(loss, 8) > 0) is meet


@pytest.mark.parametrize("samples", [2, 3])
def test_a_deviation_that_other_choices_of_few_samples_have_not_is_found(samples: int) -> None:
    x, y = torch.randn(2, samples, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    look = ExchangedSamples()
    look.next(object(), samples)
    look.follow([x, y.requires_grad_()], samples)
    look.begin()
    try:
        given, loss = (x - x.mean(0)) / x.std(0), F.mse_loss(y, x / x.std(0))
    finally:
        look.end()
    assert look.meet(loss, samples) == 1
    look.given([x], samples)
    assert look.meet(loss * 0, samples) == 0
    look.given([given], samples)
    assert look.meet(loss * 0, samples) == 1


def filled(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    rows = torch.zeros(len(samples), 3, dtype=torch.float64)
    for i, one in enumerate(samples):
        rows[i] = one.clone()
    return rows


@pytest.mark.parametrize(
    "together",
    [
        torch.stack,
        lambda samples: torch.cat([one[None] for one in samples]),
        lambda samples: torch.nn.utils.rnn.pad_sequence(samples, batch_first=True),
        filled,
    ],
)
def test_a_batch_that_the_loop_makes_of_a_list_of_samples_is_followed(together: Together) -> None:
    generator = torch.Generator().manual_seed(0)
    each = [torch.randn(2, 3, dtype=torch.float64, generator=generator).unbind() for _ in range(4)]
    weights = torch.eye(3, dtype=torch.float64, requires_grad=True)

    def off_listed(loss_of: Loss, order: Sequence[int] = range(4)) -> float:
        look = ExchangedSamples()
        look.next(object(), 4)
        look.follow_batch([one for pair in each for one in pair], 4)
        look.begin()
        try:
            inputs, target = (together([each[i][j] for i in order]) for j in (0, 1))
            output = inputs @ weights
            loss = loss_of(output, target)
        finally:
            look.end()
        return look.meet(loss, 4)

    assert off_listed(F.mse_loss) == off_listed(F.mse_loss, [2, 0, 1, 3]) == 0
    assert off_listed(lambda output, y: F.cross_entropy(output @ y.T, torch.arange(4))) > 0.01
    for order in ([0, 1, 2, 3], [2, 0, 1, 3]):  # as sorted by length
        assert off_listed(lambda output, y: F.mse_loss(output, y / y.std()), order) > 0.01
