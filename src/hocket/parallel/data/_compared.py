"""Finds a loss of one sample that compares samples of a batch: it has nothing to compare that one with."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from hocket.comm import torch_adapter

from ..batches import addends, is_empty, kind_of, scaled_by
from ._coupling import behind

_SATURATING = (
    "Clamp", "ClampMin", "ClampMax", "Relu", "Threshold", "Hardtanh", "Maximum", "Minimum", "Where", "MaskedFill",
)  # fmt: skip


def compares_samples(loss: torch.Tensor, outputs: Sequence[torch.Tensor], made: set[int]) -> bool:
    """Return whether a loss of one sample compares it with others, of which there is none here.

    Two things tell it. An operator puts samples in another order, or makes a matrix of samples by samples. Or a term
    does not depend on what the model gave, as the cross-entropy of in-batch negatives, which is over one class then, or
    numbers less their mean over samples. What is masked or has a factor of 0 is not meant, nor a hinge that is
    satisfied.

    Args:
        loss: A scalar.
        outputs: Of the model.
        made: Their places in the graph.
    """
    rows = [one for one in outputs if one.requires_grad and one.dim() and not one.is_leaf]
    if loss.grad_fn is None or not rows:
        return False
    for term in addends(loss):
        if term is None or is_empty(term) or not torch_adapter.reaches(term, made):
            continue
        nodes = list(behind(term, made))
        if any(_puts_beside(one, made) for one in nodes):
            return True
        if not any(map(_takes_nothing, nodes)) and _is_constant(term, nodes, rows):
            return True
    return False


def _takes_nothing(node: Any) -> bool:
    """Return whether an operator multiplies by a number that is 0: a weight that grows later, an output that is unused.

    A vector of one number is no such factor: advantages that are normalised are 0 where there is one sample.
    """
    by = scaled_by(node)[0] if kind_of(node) == "Mul" else None
    return by is not None and not by.dim() and not bool(by)


def _puts_beside(node: Any, made: set[int]) -> bool:
    """Return whether an operator has a place for another sample of the batch beside each."""
    kind, sizes = kind_of(node), torch_adapter.result_sizes(node)
    below = [one for one, _ in node.next_functions]
    if kind in ("Flip", "Roll"):
        dims = node._saved_dims
        return len(sizes) > 1 and sizes[0] == 1 and any(dim in (0, -len(sizes), 2**64 - len(sizes)) for dim in dims)
    both = len(below) > 1 and all(one is not None and torch_adapter.reaches(one, made) for one in below[:2])
    if "Cdist" in node.name() or "EuclideanDist" in node.name():
        return both and sizes == (1, 1)
    return kind == "Mm" and both and sizes == (1, 1)


def _is_constant(term: Any, nodes: Sequence[Any], rows: Sequence[torch.Tensor]) -> bool:
    """Return whether a term's derivative by outputs is zero, and no clamp or mask has made it so."""
    one = torch.ones(torch_adapter.result_sizes(term), dtype=rows[0].dtype, device=rows[0].device)
    edges: list[Any] = [edge for node in nodes if kind_of(node) in _SATURATING for edge in _edges(node)]
    try:
        found = torch.autograd.grad(
            [GradientEdge(term, 0)], [*rows, *edges], [one], retain_graph=True, allow_unused=True
        )
    except RuntimeError:  # what a part needs has been changed in place, or the term has another type
        return False
    slopes, rest = found[: len(rows)], dict(zip(edges, map(_is_zero, found[len(rows) :]), strict=True))
    saturated = (
        not rest[own] and all(rest[one] for one in below)
        for own, *below in (list(_edges(node)) for node in nodes if kind_of(node) in _SATURATING)
    )
    return any(one is not None for one in slopes) and all(map(_is_zero, slopes)) and not any(saturated)


def _is_zero(slopes: torch.Tensor | None) -> bool:
    return slopes is None or not slopes.count_nonzero()


def _edges(node: Any) -> Iterator[GradientEdge]:
    """Yield the edge of what an operator gives, and those of what it goes over."""
    yield GradientEdge(node, 0)
    yield from (GradientEdge(one, place) for one, place in node.next_functions if one is not None)
