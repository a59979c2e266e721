"""Notes the values of a loss's terms, and finds those that do not add up over parts, however small they are."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from hocket.comm import torch_adapter

from ._loss_graph import divisor_of_some
from ._loss_nodes import SAME_VALUES, kind_of

_OFF: Final = 5.0
"""Of a term, in units of how far losses may be apart: more than rounding does to those that do not all but cancel."""

_LEAST: Final = 0.01
"""Of the loss, in the same units: what such a term may be off."""

_VALUE: Final = "hocket's value"
"""Under which the value is kept in the metadata of the operator that gave it."""

_ROUNDED: Final = 16.0
"""Roundings of a sum of absolute values, at most, that are left of a sum whose terms cancel."""


class Cancelling(NamedTuple):
    """A sum or mean, or one for each row, of which terms that cancel have left nothing but rounding.

    So is a policy gradient's first loss. Sums of fourth powers never cancel, and are sums of one term for each sample
    where their like are.
    """

    rounding: float
    """What rounding may have left of it; 0 of one that is more than that."""
    fourths: float
    """The sum of fourth powers of its terms."""

    @classmethod
    def of(cls, terms: torch.Tensor, result: torch.Tensor, *, mean: bool) -> "Cancelling":
        """Return what is known of terms and their sum or mean; both are floating-point numbers."""
        strided = terms.layout is torch.strided and result.layout is torch.strided
        if not strided or not terms.numel() or not result.numel():
            return cls(0.0, 0.0)
        size = float(torch.linalg.vector_norm(terms.detach(), 1, dtype=torch.float64))
        rounding = _ROUNDED * torch.finfo(terms.dtype).eps * size / (terms if mean else result).numel()
        left = float(torch.linalg.vector_norm(result.detach(), torch.inf))
        return cls(rounding if left <= rounding else 0.0, fourths(terms))


def fourths(terms: torch.Tensor) -> float:
    """Return the sum of fourth powers."""
    return float(torch.linalg.vector_norm(terms.detach(), 4, dtype=torch.float64)) ** 4


class TermValues(TorchFunctionMode):
    """Notes each number that is computed with a gradient, at the operator that gave it: no graph is kept for it."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[int, Cancelling] = {}  # by their places in the graph

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.grad_fn is not None:
            node: Any = result.grad_fn
            if result.numel() == 1:
                node.metadata[_VALUE] = float(result.detach())
            name, terms = getattr(func, "__name__", ""), args[0] if args else result
            known = isinstance(terms, torch.Tensor) and terms.is_floating_point() and not torch_adapter.in_transform()
            if name in ("sum", "mean") and known:
                self._sums[node._sequence_nr()] = Cancelling.of(terms, result, mean=name == "mean")
        return result

    def sums_of(self, loss: torch.Tensor) -> tuple[Cancelling, ...]:
        """Return the sums and means that a loss was computed from, in the order in which they were."""
        places = torch_adapter.met([loss], set(self._sums)) if self._sums else ()
        return tuple(self._sums[one] for one in sorted(places))


@dataclass(frozen=True, slots=True)
class Addends:
    """What a loss adds up, as numbers."""

    samples: int
    value: float  # of the loss
    values: tuple[float, ...]  # of what it adds up; NaN of what was not noted
    count: float  # what the first of them divides by of which that is known; 0 if there is none
    rounding: float  # what of any value may be nothing but rounding
    sums: tuple[Cancelling, ...]  # that it was computed from

    @classmethod
    def of(cls, loss: torch.Tensor, samples: int, values: TermValues) -> "Addends":
        """Return what a loss of so many samples adds up, whose `values` were noted while it was computed."""
        each, count = tuple(map(_value, addends(loss))), divisor_of_some(loss, samples)
        sums = values.sums_of(loss)
        return cls(samples, float(loss.detach()), each, count, max((one.rounding for one in sums), default=0.0), sums)


def term_off(whole: Addends, parts: Sequence[Addends], weights: Sequence[float], tolerance: float) -> str:
    """Return how a term of a loss is not that of its parts; "" if none is so.

    Such is the balance of a mixture of experts, a thousandth of the loss: no comparison of losses would show it.

    Args:
        whole: The loss of some samples.
        parts: Those of parts of them.
        weights: Of the parts.
        tolerance: How far losses may be apart, relative.
    """
    alike = all(len(one.sums) == len(whole.sums) for one in parts)
    for mine, *theirs in zip(whole.sums, *(one.sums for one in parts), strict=True) if alike else ():
        total = sum(one.fourths for one in theirs)
        if all(math.isclose(one.fourths, mine.fourths) for one in theirs):
            continue  # of parameters alone, as where weights are centred
        if mine.rounding and abs(mine.fourths - total) > _OFF * tolerance * max(mine.fourths, total):
            return (
                f"a sum in it whose terms cancel has others for {whole.samples} samples than for the first "
                f"{parts[0].samples} and the others: samples meet in it (advantages that are normalised over the batch)"
            )
    if any(len(one.values) != len(whole.values) for one in parts):
        return ""
    for value, *others in zip(whole.values, *(one.values for one in parts), strict=True):
        combined = sum(map(operator.mul, others, weights))
        if abs(value - combined) <= max(one.rounding for one in (whole, *parts)):
            continue
        off = abs(value - combined) / tolerance
        if off > _OFF * max(map(abs, (value, *others))) and off > _LEAST * abs(whole.value):
            return (
                f"a term of it is {value:.6g} for {whole.samples} samples, and {combined:.6g} for the first "
                f"{parts[0].samples} and the others combined: it is a sum, or samples meet in it (as where experts are "
                "balanced over the batch)"
            )
    return ""


def _value(node: Any) -> float:
    return math.nan if node is None else node.metadata.get(_VALUE, math.nan)


def addends(loss: torch.Tensor) -> list[Any]:
    """Return the operators of which a loss is the sum."""
    found: list[Any] = []
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        below = [one for one, _ in node.next_functions if one is not None] if node is not None else []
        kind = kind_of(node) if below else ""
        if kind in ("Add", "Sub") or (kind in SAME_VALUES and len(below) == 1):
            todo += reversed(below)
        else:
            found.append(node)
    return found
