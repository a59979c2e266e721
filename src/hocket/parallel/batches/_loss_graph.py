"""What the graph of automatic differentiation tells of a loss: by what each of its terms divides."""

import math
from dataclasses import replace
from typing import Any

import torch

from hocket.comm import torch_adapter

from ._loss_nodes import CHAIN, LAYERS, MEANS, elements_of, is_empty, is_plain, is_sum, kind_of, mask_of, sizes_of
from ._loss_terms import Term, terms

_SUM = -1.0  # the count of a term that divides by nothing


def divisors(
    loss: torch.Tensor, samples: int | None = None, *, once: bool = False, inverse: bool = False
) -> tuple[float, ...]:
    """Return what each term of a loss divides by: labels that are not ignored, their weights, elements of a mean.

    A sum that is divided twice, by a constant and by a count, divides by their product: nothing tells them apart on
    every rank alike, and the product is in proportion to the count. With `once` it is what is more likely the count.
    With `inverse` sums that are multiplied by 1/n are divided by n, where all terms are such.

    The graph of automatic differentiation has kept it. () where some term is of a form that is not known here. A loss
    of which nothing counts, as everything is masked, has one that divides by 0. Terms of parameters alone (a penalty of
    weights) are the same whatever the samples are, and are left out.
    """
    if loss.grad_fn is None:  # perhaps a zero that the program has made
        return (0.0,) if loss.requires_grad and not bool(loss.any()) else ()
    parts = terms(loss, samples)
    if is_empty(loss.grad_fn) and all(one.divisor is None and not one.wholes for one in parts):
        return (0.0,)
    inverse = inverse and all(one.divisor is None and one.inverse is not None for one in parts)
    parts = [replace(one, more=1.0) for one in parts] if once else parts
    counts = [_count(one, samples, inverse=inverse) for one in parts]
    found = [one for one in counts if one is not None and one >= 0]
    if len(found) < len(parts):
        return ()
    if len(parts) == 1 and parts[0].divisor is not None and not is_sum(parts[0].node):
        return (found[0] * abs(float(parts[0].divisor)),)  # a mean of what is masked, divided by that of the mask
    return tuple(found)


def inverses(loss: torch.Tensor, samples: int) -> tuple[float, ...]:
    """Return one divided by what each term of a loss is multiplied by, all numbers together, where all are sums.

    If the numbers are constants but for one that is 1/n, or by which is divided, that is in proportion to n.
    """
    parts = terms(loss, samples) if loss.grad_fn is not None else []
    if not all(one.is_sum and one.scale and math.isfinite(one.scale) for one in parts):
        return ()
    return tuple(0.0 if _count(one, samples, inverse=True) == 0 else 1 / one.scale for one in parts)


def divisor_of_some(loss: torch.Tensor, samples: int) -> float:
    """Return what the first term of a loss divides by of which that is known; 0 if there is none."""
    parts = terms(loss, samples) if loss.grad_fn is not None else []
    return next((count for one in parts if one.factor and (count := _count(one, samples) or 0.0) > 0), 0.0)


def divided_by(loss: torch.Tensor, samples: int | None = None) -> float:
    """Return what a loss divides by where all of its terms are sums over the same; else 0.

    Args:
        loss: A scalar.
        samples: How many it is of; None if that is not known.
    """
    parts = terms(loss, samples) if loss.grad_fn is not None else []
    if any(one.node is None or not is_sum(one.node) or one.divisor is None for one in parts):
        return 0.0
    found = {abs(float(one.divisor)) for one in parts if one.divisor is not None}
    return found.pop() if len(found) == 1 else 0.0


def divides_by_samples(loss: torch.Tensor, samples: int) -> bool:
    """Return whether all terms of a loss are sums that the program divides by `len(batch)`, however many there are."""
    parts = terms(loss, samples) if loss.grad_fn is not None else []
    known = [one.divisor for one in parts if one.node is not None and is_sum(one.node) and one.divisor is not None]
    return len(known) == len(parts) > 0 and all(is_plain(one) and float(one) == samples for one in known)


def divisor_of_shares(loss: torch.Tensor, samples: int) -> float:
    """Return what a loss divides by that adds up means of parts, each times its share of all; 0 for another one."""
    parts = terms(loss, samples) if loss.grad_fn is not None else []
    counts = [_count(one, samples) or 0.0 for one in parts]
    by, factors = sum(counts), [one.factor for one in parts]
    each = zip(factors, counts, strict=True)
    shares = len(parts) > 1 and all(n > 0 and math.isclose(f * by, n, rel_tol=1e-5) for f, n in each)
    return by if shares and math.isclose(sum(factors), 1, rel_tol=1e-5) else 0.0


def guarded(loss: torch.Tensor, samples: int | None = None, *, inverse: bool = False) -> bool | None:
    """Return whether sums of a loss are divided by 1 where there was nothing to count: `sum / count.clamp(min=1)`.

    It may be so: where the loss is divided by its samples, and there is one, it looks the same. With `inverse` a factor
    of 1 beside a divisor is one divided by a count, too: `sum / 2 * (1 / max(1, count))`.

    Returns:
        None where there may have been one thing to count.
    """
    if loss.grad_fn is None:
        return False
    parts = terms(loss, samples)
    sums = [one for one in parts if one.node and is_sum(one.node) and one.factor]
    ones = [(one.node, one.by) for one in sums if one.by is not None and _divides_by_one(one, samples, inverse)]
    told: dict[int, set[bool | None]] = {}  # by where the divisor is: terms that share it count the same
    for node, by in ones:
        told.setdefault(by.data_ptr(), set()).add(_is_of_nothing(node) or _counts_nothing(node))
    found = [False if False in some else True in some or None for some in told.values()]
    if all(one is False for one in found):
        return False
    others = [_count(one, samples, inverse=True) for one in parts if all(one.node is not node for node, _ in ones)]
    return True if all(found) and not any(others) else None


def _divides_by_one(term: Term, samples: int | None, inverse: bool) -> bool:
    """Return whether 1 is what a sum is divided by, or one of such numbers where nothing counts."""
    if term.divisor is not None:
        alone = abs(float(term.divisor)) == 1
        one = term.by_one or (inverse and term.counts_whole and 1 in term.wholes)
    else:
        alone, one = set(term.wholes) == {1}, 1 in term.wholes and samples not in term.wholes
    return alone or (one and bool(_is_of_nothing(term.node) or _counts_nothing(term.node)))


def _is_of_nothing(node: Any) -> bool:
    """Return whether a sum goes over no elements, or masked ones alone."""
    return 0 in sizes_of(node) or is_empty(node, torch.ones((), dtype=torch.int64))


def _counts_nothing(root: Any) -> bool | None:
    """Return whether labels show that nothing is counted, or masks that one thing is; None where neither is so."""
    if elements_of(root) == 1:
        return False
    nothing, todo = None, [root]
    for _ in range(4 * CHAIN):
        if not todo:
            break
        node = todo.pop()
        kind, below = kind_of(node), [one for one, _ in node.next_functions if one is not None]
        kept: Any = None
        if kind in ("NllLoss", "NllLoss2D"):
            kept = node._saved_target != (node._saved_ignore_index + 2**63) % 2**64 - 2**63
        elif kind.startswith("BinaryCrossEntropy"):
            kept = node._saved_target
            nothing = nothing or not bool(kept.any()) or None
        elif kind in ("Mul", "Dot", "MaskedFill", "Where") and len(below) == 1:
            kept = mask_of(node)
        elif kind in ("Index", "MaskedSelect"):
            if torch_adapter.result_sizes(node)[:1] == (1,):
                return False
            continue
        if kept is not None and kept.numel() > 1 and float(kept.sum()) == 1:
            return False
        if not kind.startswith(LAYERS):
            todo += below
    return nothing


def _count(term: Term, samples: int | None, *, inverse: bool = False) -> float | None:
    """Return what a term divides by; _SUM for nothing, None where that is not known."""
    node = term.node
    if node is None:
        return None
    if is_sum(node):
        by = term.by if inverse or term.divisor is not None else None
        if by is None or (term.divisor is None and not term.factor):
            return _SUM if term.factor else 0.0  # `output.sum() * 0`, where a part has nothing that counts
        # One sample of which nothing counts may be divided by their number: `guarded` tells of it. A tensor is none.
        by_samples = samples == 1 if term.divisor is not None else samples in term.wholes
        empty = term.by_nothing and not (by_samples and is_plain(by)) and is_empty(node, by)
        number = math.prod(term.wholes) if term.divisor is None else abs(float(term.divisor)) * term.more
        return 0.0 if empty else float(number)
    if node.name() in MEANS:
        return float(node._saved_self_sym_numel)
    if getattr(node, "_saved_reduction", None) == 1 and hasattr(node, "_saved_self"):
        nll = kind_of(node) in ("NllLoss", "NllLoss2D")
        return float(node._saved_total_weight if nll else node._saved_self.numel())
    return None
