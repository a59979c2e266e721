"""Notes the values of a loss's terms, and finds those that do not add up over parts, however small they are."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from ._loss_graph import divisor_of_some
from ._loss_nodes import SAME_VALUES, kind_of

_OFF: Final = 5.0
"""Of a term, in units of how far losses may be apart: more than rounding does to those that do not all but cancel."""

_LEAST: Final = 0.01
"""Of the loss, in the same units: what such a term may be off."""

_VALUE: Final = "hocket's value"
"""Under which the value is kept in the metadata of the operator that gave it."""


class TermValues(TorchFunctionMode):
    """Notes each number that is computed with a gradient, at the operator that gave it: no graph is kept for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.grad_fn is not None and result.numel() == 1:
            node: Any = result.grad_fn
            node.metadata[_VALUE] = float(result.detach())
        return result


@dataclass(frozen=True, slots=True)
class Addends:
    """What a loss adds up, as numbers."""

    samples: int
    value: float  # of the loss
    values: tuple[float, ...]  # of what it adds up; NaN of what was not noted
    count: float  # what the first of them divides by of which that is known; 0 if there is none

    @classmethod
    def of(cls, loss: torch.Tensor, samples: int) -> "Addends":
        """Return what a loss of so many samples adds up, which was computed under TermValues."""
        return cls(samples, float(loss.detach()), tuple(map(_value, addends(loss))), divisor_of_some(loss, samples))


def term_off(whole: Addends, parts: Sequence[Addends], weights: Sequence[float], tolerance: float) -> str:
    """Return how a term of a loss is not that of its parts; "" if none is so.

    Such is the balance of a mixture of experts, a thousandth of the loss: no comparison of losses would show it.

    Args:
        whole: The loss of some samples.
        parts: Those of parts of them.
        weights: Of the parts.
        tolerance: How far losses may be apart, relative.
    """
    if any(len(one.values) != len(whole.values) for one in parts):
        return ""
    for value, *others in zip(whole.values, *(one.values for one in parts), strict=True):
        combined = sum(map(operator.mul, others, weights))
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
