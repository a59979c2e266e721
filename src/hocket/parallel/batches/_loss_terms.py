"""The terms of a loss, as the graph of automatic differentiation tells them, with what each is multiplied by."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ._loss_nodes import (
    MEANS,
    MOST,
    OVER_RANKS,
    PRODUCTS,
    SAME_VALUES,
    SUMS,
    dims_of,
    dotted_with,
    elements_of,
    is_of_one,
    is_plain,
    is_sum,
    is_taken,
    kind_of,
    of_parameters,
    of_scalar,
    scaled_by,
    size_of,
)

_KEEPING = "MaskedFill", "MaskedSelect", "Where", "Index", "IndexSelect"
_LEAST_INVERSE = 1e-6  # one divided by more than a million is a whole number's inverse by rounding alone


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a loss."""

    node: Any  # the operator that gives it, below constant factors; None where there are too many to tell
    factor: float  # by what it is multiplied, of which the sign is left out
    divisor: torch.Tensor | None  # what it is divided by; None for nothing
    again: bool = False  # whether it is a quotient that is divided once more, as by the number of samples
    more: float = 1.0  # what it is divided by besides, as by 2 in `(square.sum() / 2) / len(batch)`
    by_one: bool = False  # whether that may have been a count of 1
    learned: bool = False  # whether a parameter is in the factor
    inverse: torch.Tensor | None = None  # a factor that is one divided by a whole number, as `1 / len(batch)`
    wholes: tuple[int, ...] = ()  # the whole numbers of all such factors

    @property
    def scale(self) -> float:
        """What it is multiplied by, with all that it is divided by."""
        return self.factor / self.more / (1.0 if self.divisor is None else abs(float(self.divisor)) or 1.0)

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum, and no mean."""
        return self.node is not None and is_sum(self.node)

    @property
    def by(self) -> torch.Tensor | None:
        """What it is divided by; else a factor that may be one divided by a count."""
        return self.inverse if self.divisor is None else self.divisor

    @property
    def by_nothing(self) -> bool:
        """Whether what it is divided by may stand for nothing that counts."""
        if self.divisor is not None:
            return float(self.divisor) <= 1 or self.by_one
        return 1 in self.wholes or (self.inverse is not None and not is_plain(self.inverse))

    @property
    def counts_whole(self) -> bool:
        """Whether a number of Python by which it is multiplied may be one divided by a count."""
        return self.inverse is not None and is_plain(self.inverse)


def terms(loss: torch.Tensor, samples: int | None = None) -> list[Term]:
    """Return what a loss adds up, but for what is computed of parameters alone.

    A sum or mean of losses that the program has put together (`torch.stack([a, b]).mean()`) is taken apart, and so is
    one over what was summed, or averaged, over the samples before (`losses.mean(0).sum()`).
    """
    found: list[Term] = []
    todo = [Term(loss.grad_fn, 1.0, None)]
    for _ in range(MOST):
        if not todo:
            break
        term = todo.pop()
        node, kind = term.node, kind_of(term.node)
        below = [one for one, _ in node.next_functions if one is not None]
        by, scaled = scaled_by(node) if kind in ("Mul", "Div") else (None, None)
        same = kind in (*SAME_VALUES, OVER_RANKS) or (kind == "Select" and _is_of_product(below))
        if kind in ("Add", "Sub") or (same and len(below) == 1):
            todo += [replace(term, node=one) for one in reversed(below)]
        elif scalar := of_scalar(node, samples):
            todo.append(replace(term, node=scalar))
        elif by is not None and by.numel() == 1:
            number = abs(float(by))
            if kind == "Div" and len(below) == 1:
                todo.append(replace(_divided(term, by, samples), node=scaled))
            else:
                factor = term.factor * (number if kind == "Mul" else 1 / (number or 1))
                learned = len(below) == 2
                term = replace(term, node=scaled, factor=factor, learned=term.learned or learned)
                todo.append(term if learned else _inverse(term, by))
        elif parts := _parts(node, samples):
            todo += [
                replace(
                    term if divisor is None else _divided(term, divisor, samples),
                    node=one,
                    factor=term.factor * factor,
                    again=term.again,
                )
                for one, factor, divisor in reversed(parts)
            ]
        else:
            found.append(_with_inner_divisor(term, samples))
    if todo:
        return [Term(None, 1.0, None)]
    return found if len(found) == 1 else [one for one in found if not of_parameters(one.node)]


def wholes(loss: torch.Tensor, samples: int) -> tuple[int, ...]:
    """Return the numbers n of all factors of a loss's terms that are 1/n."""
    return tuple(n for one in terms(loss, samples) for n in one.wholes)


def is_one_by_one(loss: torch.Tensor, samples: int) -> bool:
    """Return whether a loss adds up those of single samples, each of which may be a mean over something else."""
    found = terms(loss, samples) if samples else []
    if len(found) < samples:
        return False
    known = [one for one in found if one.node]
    quotients = [one for one in known if one.again or not is_sum(one.node)]
    return any(is_of_one(one.node, samples) for one in known) or any(is_taken(one.node, samples) for one in quotients)


def _divided(term: Term, by: torch.Tensor, samples: int | None) -> Term:
    """Return a term of which what is within is divided, too: by a count, or by a constant where the term has one."""
    if term.divisor is None:
        return replace(term, divisor=by)
    outer, inner, odd = term.divisor, by, max(1, samples or 1)
    constant = is_plain(inner) and (
        not is_plain(outer) or (float(inner) % odd != 0 and float(outer) % odd == 0)  # `/ 2 / len(batch)`
    )
    count, other = (outer, inner) if constant else (inner, outer)
    number = abs(float(other))
    return replace(term, divisor=count, again=True, more=term.more * (number or 1.0), by_one=term.by_one or number == 1)


def _with_inner_divisor(term: Term, samples: int | None) -> Term:
    """Return a sum with what all that it goes over is divided by: `(losses / len(batch)).sum()`."""
    below = term.node if term.node.name() in (*SUMS, *PRODUCTS) else None
    while below is not None:
        kind, inner = kind_of(below), [one for one, _ in below.next_functions if one is not None]
        by = scaled_by(below)[0] if kind in ("Mul", "Div") and len(inner) == 1 else None
        if by is not None and not by.dim():  # a vector may be of one sample
            if not by:
                break
            if kind == "Div":
                return _divided(term, by, samples)
            scaled = _inverse(replace(term, factor=term.factor * abs(float(by))), by)
            return term if scaled.wholes == term.wholes else scaled
        passes = below is term.node or kind in (*SAME_VALUES, *_KEEPING) or (kind == "Mul" and by is not None)
        below = inner[0] if passes and len(inner) == 1 else None
    return term


def _inverse(term: Term, factor: torch.Tensor) -> Term:
    """Return a term that is multiplied by a number, and whether that is one divided by a whole number."""
    number = abs(float(factor))
    whole = round(1 / number) if number > _LEAST_INVERSE else 0
    rounding = 2 * torch.finfo(factor.dtype).eps if factor.is_floating_point() else 0.0
    if not whole or abs(number * whole - 1) > rounding:
        return term
    first = term.inverse is None or not is_plain(factor)
    return replace(term, inverse=factor if first else term.inverse, wholes=(*term.wholes, whole))


def _is_of_product(below: Sequence[Any]) -> bool:
    """Return whether a value is that of a product of one element: `(losses[None] @ mask)[0]`."""
    one = below[0]
    while kind_of(one) == "Select" and one.next_functions[0][0] is not None:
        one = one.next_functions[0][0]
    return one.name() in PRODUCTS and size_of(one) == 1


def _parts(node: Any, samples: int | None) -> list[tuple[Any, float, torch.Tensor | None]]:
    """Return what a sum or mean goes over, if that was put together or is of all samples, with factors and divisors."""
    kind, size = kind_of(node), elements_of(node)
    if node.name() not in (*SUMS, *MEANS) or not size:
        return []
    factors = torch.full((size,), 1.0 / size if kind == "Mean" else 1.0, dtype=torch.float64)
    divided: torch.Tensor | None = None
    below = node
    while True:
        kind = kind_of(below)
        if kind in ("Dot", "Vdot", "Mul", "Div"):
            by, rest = dotted_with(below) if kind in ("Dot", "Vdot") else scaled_by(below)
            if by is None or by.numel() not in (1, size):
                return []
            by = by.to("cpu", torch.float64).reshape(-1)
            if kind == "Div":
                divided = by.expand(size)
            else:
                factors = factors * by.abs()
        elif kind in ("Add", "Sub") and len(added := _of_samples(below)) == 1:  # `(losses * (-s).exp() + s).sum()`
            rest = added[0]
        elif below is not node and kind not in SAME_VALUES:
            break
        else:
            rest = below.next_functions[0][0]
        if rest is None:
            return []
        below = rest
    inner = [one for one, _ in below.next_functions]
    if kind in ("Stack", "Cat"):
        each = samples is None or (not size % max(1, samples) and any(is_of_one(one, samples) for one in inner))
        if each or all(is_taken(one, samples) for one in inner) or size < 2 or len(inner) != size or None in inner:
            return []
        counts: list[torch.Tensor | None] = [None] * size if divided is None else list(divided)
        return [(one, f, d) for one, f, d in zip(inner, factors.tolist(), counts, strict=True)]
    sizes = tuple(getattr(below, "_saved_self_sym_sizes", ()))
    if kind not in ("Mean", "Sum", "Nansum") or 0 not in dims_of(below):
        return []
    if kind == "Mean":
        return [(below, float((factors if divided is None else factors / divided).sum()), None)]
    if inner[0] is None or kind_of(inner[0]) == "Stack" or not samples or sizes[0] % samples:
        return []
    if divided is None:  # the mean of sums over samples is a sum, whatever else it goes over
        return [(below, float(factors.mean()) * (size if node.name() in MEANS else 1), None)]
    return [(below, f, d) for f, d in zip(factors.tolist(), divided, strict=True)]


def _of_samples(node: Any) -> list[Any]:
    """Return what an operator goes over that has a gradient, but for what is made of parameters alone."""
    return [one for one, _ in node.next_functions if one is not None and not of_parameters(one)]
