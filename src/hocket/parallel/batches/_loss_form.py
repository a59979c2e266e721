"""How a loss adds up over the parts of a batch: the weight of each part, and what all of them divide by.

The loss of a batch is the sum of `weight * loss` over its parts, divided by the sum of their counts. A mean over
samples has the samples as weight and count; a mean over tokens, or one weighted by classes, has what its own graph
divides by; a sum has weight 1, and nothing to divide by.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ._loss_graph import divided_by, divisors, guarded
from .trees import mapped

GUARDED = (
    "the loss divides a sum by 1 in a part of the batch, and by other counts in others, and nothing shows whether one "
    "thing was counted there or none: does the program guard against dividing by zero (`sum / count.clamp(min=1)`)? "
    'With hocket.distribute say loss_reduction="sum", and divide by hocket.total(count).clamp(min=1); with '
    "hocket.Trainer return (sum, count) from loss_fn"
)
"""Said of losses that may have counted nothing."""

Reduction = Literal["mean", "sum"]
Kind = Literal["sum", "weight", "graph", "samples"]


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """The loss of a part of a batch."""

    loss: torch.Tensor  # as the loss function has given it, a scalar
    weight: float  # what it is multiplied with before parts are added up
    count: float  # the part's share of what the sum is divided by
    terms: tuple[float, ...] = ()  # what each term of the loss divides by, as far as its graph tells
    paired: bool = False  # whether the loss function has given sum and count
    # whether a count of 1 stands for nothing, unless the loss divides by samples; None if that is not known
    guard: bool | None = False
    by_samples: bool = True  # whether the loss may divide by samples

    @property
    def value(self) -> float:
        """The loss as a number."""
        return float(self.loss.detach())


@dataclass(slots=True)
class LossForm:
    """What is known of a loss."""

    reduction: Reduction = "mean"  # what the user says it is
    # gives the count of a part of a batch, as the loader yields it; None if nobody has said so
    counter: Callable[[Any], Any] | None = None
    kind: Kind = field(init=False)  # by what parts are weighted where the loss does not bring its count along
    rate: float = 1.0  # counts per sample in the last batch, the same on every rank
    ratios: tuple[float, ...] = (1.0,)  # what each term divides by, in units of what the first divides by
    counts: bool = False  # whether the loss has divided by something else than samples
    # whether the model computes the loss, so that its own graph alone tells the count; None if not known
    inside: bool | None = None

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f'loss_reduction must be "mean" or "sum", not {self.reduction!r}')
        if self.counter is not None and self.reduction == "sum":
            raise ValueError('loss_weight is what a mean divides by; with loss_reduction = "sum" leave it out')
        self.kind = "sum" if self.reduction == "sum" else "graph" if self.counter is None else "weight"

    def measure(self, value: Any, inputs: Any, target: Any, samples: int) -> MeasuredLoss:
        """Return the loss of a part of a batch, and by what it counts.

        `value` is what the loss function has given, a scalar or a pair of sum and count; of a part that is there only
        to keep step `samples` is 0.

        Raises:
            TypeError: the loss is no scalar, or the count no number.
        """
        if isinstance(value, tuple | list) and len(value) == 2:
            count = number(value[1], "the count of (sum, count)") if samples else 0.0
            return MeasuredLoss(scalar(value[0]), float(samples > 0), count, paired=True)
        loss = scalar(value)
        terms = divisors(loss, samples) if self.kind == "graph" else ()
        if not samples:
            return MeasuredLoss(loss, 0.0, 0.0, terms)
        if self.kind == "sum":
            return MeasuredLoss(loss, 1.0, 0.0)
        count = float(samples)
        if self.counter is not None:
            count = number(self.counter(batch_of(inputs, target)), "loss_weight")
            if count or not (by := divided_by(loss, samples)):
                return MeasuredLoss(loss, count, count)
            if by == 1:  # a sum, divided by 1 since nothing counts
                return MeasuredLoss(loss, 1.0, 1.0, guard=True, by_samples=False)
            return MeasuredLoss(loss, by, 0.0)
        each = divisors(loss, samples, once=True) if terms else ()
        guard = bool(terms) and guarded(loss, samples)
        if guard:
            terms = tuple(one or 1.0 for one in terms)
        if len(terms) == len(self.ratios) or self._of_one_count(terms):
            count = terms[0]
        return MeasuredLoss(loss, count, count, terms, guard=guard, by_samples=not any(terms) or samples in each)

    def divides_as_known(self, terms: tuple[float, ...]) -> bool:
        """Return whether the terms of a part's loss divide by what those of earlier parts did."""
        if len(terms) != len(self.ratios):
            return self._of_one_count(terms)
        return all(
            abs(one - terms[0] * ratio) <= 1e-4 * max(one, terms[0] * ratio)
            for one, ratio in zip(terms, self.ratios, strict=True)
        )

    def _of_one_count(self, terms: tuple[float, ...]) -> bool:
        """Return whether all terms divide by one count, and did before, when they were more or fewer."""
        return len({*terms}) == 1 and all(abs(ratio - 1) <= 1e-4 for ratio in self.ratios)

    def evaluate(self, loss_fn: Callable[[Any, Any], Any], output: Any, target: Any) -> Any:
        """Return what the loss function gives for an output, with the graph that tells what it divides by."""
        if self.inside:
            return loss_fn(output, target)
        with torch.enable_grad():
            return loss_fn(mapped(output, _leaf), target)

    def expected(self, samples: int) -> float:
        """Return what a batch of so many samples divides by if it is like the last one; the same on every rank."""
        return 1.0 if self.kind == "sum" else self.rate * samples


def batch_of(inputs: Any, target: Any) -> Any:
    """Return the part of a batch as the loader yields it."""
    if isinstance(inputs, Mapping):
        return target if isinstance(target, Mapping) else inputs
    return tuple(inputs) if target is None else (*inputs, target)


def number(value: Any, what: str) -> float:
    """Return a count as a number. Raises TypeError: it is none."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise TypeError(f"{what} must be one number, not a tensor of shape {list(value.shape)}")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} must be a number, not {type(value).__name__}") from error


def scalar(loss: Any) -> torch.Tensor:
    """Return the loss; TypeError if it is no scalar."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        with torch.enable_grad():  # the graph is wanted even where none is being made
            return loss.reshape(())
    found = f"one of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise TypeError(f"loss_fn must give a scalar tensor, or a pair (sum, count), not {found}")


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().requires_grad_().clone()  # a loss may change it in place


class LossTally:
    """Adds up the losses of parts of a batch, then of ranks."""

    def __init__(self, form: LossForm, device: torch.device | None = None) -> None:
        # of weighted losses, counts, parts, parts that are not weighted as the form says, losses that are 0 and count
        # nothing, counts that may stand for nothing, parts of which that is not known, and parts that do not divide by
        # samples; of parts that are not weighted as the form says, but whose graph tells what they divide by, how many
        # these are, what they divide by for each sample, and its squares; parts whose loss has a new form
        self.sums = torch.zeros(12, dtype=torch.float64, device=device)
        self._form = form

    def add(self, measured: MeasuredLoss, *, new: float = 0.0) -> None:
        """Add a part that counts; `new` is not 0 where its loss is computed otherwise than those before."""
        loss = measured.loss.detach().to(self.sums)
        if new:
            self.sums[11] += new
        if measured.weight:
            self.sums[0] += loss * measured.weight
        else:
            self.sums[4] += loss == 0
        form, odd = self._form, False
        if form.kind == "graph" and not measured.paired and measured.weight:
            odd = not form.divides_as_known(measured.terms)
            if odd and measured.terms:
                each = sum(i * one for i, one in enumerate(measured.terms, 1)) / measured.count
                self.sums[8:11] += torch.tensor([1.0, each, each * each], dtype=torch.float64).to(self.sums)
        self.sums[1:4] += torch.tensor([measured.count, 1.0, float(odd)], dtype=torch.float64).to(self.sums)
        if measured.guard is not False or not measured.by_samples:
            guards = [measured.count * bool(measured.guard), measured.guard is None, not measured.by_samples]
            self.sums[5:8] += torch.tensor(guards, dtype=torch.float64).to(self.sums)

    def mean(self) -> tuple[torch.Tensor, float]:
        """Return the loss, and the count that it was divided by: 1 for a sum.

        Raises:
            RuntimeError: terms of the loss divide by counts that differ, or there is nothing to count by which to
                divide a sum; on every rank alike.
        """
        if self._form.kind == "sum":
            return self.sums[0], 1.0
        added, count, parts, odd, zeros, guarding, unsure, off, told, each, squares, _ = self.sums.tolist()
        if parts > 1 and (off or self._form.counts):
            self._form.counts = True
            if unsure:
                raise RuntimeError(GUARDED)
            count = count - guarding or min(guarding, 1.0)
        unlike = told < parts or squares * told - each * each > 1e-6 * squares * told
        # Terms that all go by samples may come and go with the program's branches.
        if odd and parts > 1 and (odd < parts or (unlike if told else len(self._form.ratios) > 1)):
            raise RuntimeError(
                f"the loss of {odd:.0f} of {parts:.0f} parts of this batch does not divide by what that of earlier "
                "ones did: its terms are means over different things (tokens, samples), or it takes another branch. "
                "Return (sum, count) from loss_fn, or make every term a mean over samples"
            )
        if count != count:  # as `AgreedCount` says it, so that every rank hears of it
            raise RuntimeError(
                "tensors of the batch that gave the same count of what the loss divides by in the first batch differ "
                "in this one: say which it is with loss_weight, or return (sum, count) from loss_fn"
            )
        if not count and added and self._form.counter is not None:
            raise RuntimeError(
                "loss_weight counts nothing in this batch, and the loss is a sum all the same, divided by something "
                "other than 1: guard against dividing by zero by `count.clamp(min=1)`, or return (sum, count) from "
                "loss_fn"
            )
        return self.sums[0] / count if count else torch.full_like(self.sums[0], 0.0 if zeros else torch.nan), count
