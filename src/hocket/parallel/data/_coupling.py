"""Finds losses of which the mean over ranks is not that of one device, from the graph that the program has made.

A `loss` is a scalar, `made` are places in the graph of the model's outputs, and `samples` how many this rank has.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from hocket.comm import torch_adapter

from ..batches import (
    SAME_VALUES,
    Term,
    is_empty,
    is_of_one,
    is_one_by_one,
    is_plain,
    is_sum,
    is_taken,
    is_zeroed,
    kind_of,
    scaled_by,
    sizes_of,
    takes_one,
    terms,
)

_DOTS = ("Dot", "Vdot", "Mv", "Mm", "Bmm")  # the last is what einsum makes of a sum of all products
_FAR = 16  # operators below one that are looked at
_OPERATORS, _FEW, _OFTEN = 256, 64, 3
"""Of the form of a loss: most operators that are looked at, of a loss that a model gives alone, and of a kind."""

_MEET = 1e-5
"""Relative to a sample's own second derivative; that by another sample is zero to the bit where they do not meet."""


def samples_meet(loss: torch.Tensor, outputs: Sequence[torch.Tensor], samples: int, *, leaves: bool = False) -> bool:
    """Return whether a loss is more than a sum of terms of one sample each, beyond the outputs of a model.

    In such a sum the derivative by one sample's output does not depend on another's. In-batch negatives, a root of a
    mean or a statistic of the batch are none. The graph is kept; where it cannot be derived twice, nothing is found.

    Args:
        loss: A scalar.
        outputs: Of the model; those count that have one row for each sample, or as many for each (views, one after
            the other or side by side).
        samples: How many there are.
        leaves: Whether outputs count that the program has cut off from what they were computed of.
    """
    if samples < 2:
        return False
    rows = [one for one in outputs if one.requires_grad and one.dim() and not len(one) % samples]
    rows = [one for one in rows if leaves or not one.is_leaf]
    if not rows or loss.numel() != 1 or not loss.requires_grad:
        return False
    try:
        with torch.enable_grad():
            first = torch.autograd.grad(loss, rows, create_graph=True, allow_unused=True)
            some = [one[0] for one in first if one is not None and one.requires_grad]
            if not some:
                return False
            weights = [torch.linspace(-1, 1.3, one.numel(), dtype=one.dtype, device=one.device) for one in some]
            probe = torch.stack([(one.reshape(-1) * w).sum() for one, w in zip(some, weights, strict=True)]).sum()
            second = torch.autograd.grad(probe, rows, retain_graph=True, allow_unused=True)
    except RuntimeError:  # a part has no second derivative, or changes what it needs in place
        return False
    found = [one.detach().abs() for one in second if one is not None and one.numel()]
    own = max((float(one[0].max()) for one in found), default=0.0)
    other = max((float(rest.max()) for one in found if (rest := _of_others(one, samples)).numel()), default=0.0)
    return other > _MEET * max(own, 1e-30) and not _meet_in_groups(loss, outputs, samples)


def _meet_in_groups(loss: torch.Tensor, outputs: Sequence[torch.Tensor], samples: int) -> bool:
    """Return whether samples have unlike numbers of rows, side by side, and those of each meet among themselves alone.

    So it is of graphs, whose nodes lie one after the other in a batch, or are given to the model graph by graph.
    """
    rows = [one for one in outputs if one.requires_grad and one.dim() and not one.is_leaf]
    if all(len(one) == samples for one in rows):
        return False
    with torch.enable_grad():
        first = torch.autograd.grad(loss, rows, create_graph=True, allow_unused=True)
    counts = []
    for one, slopes in zip(rows, first, strict=True):
        at = groups = 0
        while slopes is not None and slopes.requires_grad and at < len(one):
            probe = (slopes[at] * torch.linspace(-1, 1.3, slopes[at].numel()).to(slopes).view_as(slopes[at])).sum()
            second = torch.autograd.grad(probe, rows, retain_graph=True, allow_unused=True)
            sizes = [None if g is None else g.detach().abs().reshape(len(g), -1).amax(1).cpu() for g in second]
            least = _MEET * max((float(some.max()) for some in sizes if some is not None), default=0.0)
            met = [some > least for some in sizes if some is not None]
            end = at + max(1, *(int(some[at:].sum()) for some in met))
            if any(some.any() if len(some) != len(one) else some[:at].any() or some[end:].any() for some in met):
                return False
            at, groups = end, groups + 1
        counts += [groups] if groups else []
    return sum(counts) == samples or set(counts) == {samples}


def outputs_apart(passes: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return what forward passes gave, but for what a later one was computed from, perhaps by batch norm."""
    found: list[torch.Tensor] = []
    for outputs in passes:
        marks = [torch_adapter.graph_marks([one]) for one in found]
        later = [one for one in outputs if one.grad_fn is not None]
        found = [
            one
            for one, mark in zip(found, marks, strict=True)
            if not any(torch_adapter.reaches(other, mark) for other in later)
        ]
        found += later
    return found


def taken_beside(loss: torch.Tensor, tensors: Sequence[torch.Tensor], made: set[int]) -> list[torch.Tensor | None]:
    """Return the tensors of which a loss was computed otherwise than by outputs; None in place of others."""
    nodes = set(behind(loss.grad_fn, made)) if tensors else set()
    return [one if one.grad_fn in nodes else None for one in tensors]


def joined(loss: torch.Tensor) -> bool:
    """Return whether a loss puts what has a gradient beside what has none: what other ranks have, or a queue."""
    nodes = (one for one in behind(loss.grad_fn, set()) if kind_of(one) == "Cat")
    return any(below is None for one in nodes for below, _ in one.next_functions)


def gathered(loss: torch.Tensor, made: set[int], ranks: int) -> bool:
    """Return whether a loss was computed from what all ranks' models gave, by collectives that have a gradient."""
    return any(torch_adapter.sums_over_ranks(one, ranks) for one in behind(loss.grad_fn, made))


def samples_paired(loss: torch.Tensor, made: set[int], samples: int) -> bool:
    """Return whether samples meet in a loss where torch has no second derivative of it, or that is zero.

    So it is of the distances of all pairs of samples; of a quotient by a sum over samples that is constant, as the sum
    of all probabilities (a Dice loss); and where the absolute value of a mean over samples is taken, or the largest of
    the means of groups.
    """
    nodes = list(behind(loss.grad_fn, made)) if samples > 1 else []
    apart = any(takes_one(one, samples) for one in nodes)
    for node in nodes:
        below = [one for one, _ in node.next_functions]
        if kind_of(node) in (*_BENT, *_RANKING) and not apart and any(_has_mean(one, made, samples) for one in below):
            return True
        if kind_of(node) == "Div" and len(below) == 2 and None not in below and not apart:
            sums = [
                one for one in behind(below[1], made) if kind_of(one) == "Sum" and _over_samples(one, made, samples)
            ]
            if any(sizes_of(one)[0] == samples and torch_adapter.reaches(one, made) for one in sums):
                return True
        if "Cdist" in node.name() and all(torch_adapter.reaches(one, made) for one in below if one is not None):
            sizes = [one.shape[-2] for one in (node._saved_x1, node._saved_x2)]
            if sizes[0] == sizes[1] == samples and None not in below:
                return True
    return False


def bends_one(loss: torch.Tensor, made: set[int]) -> bool:
    """Return whether a loss of one sample may bend a sum or mean over samples: a dice of classes, an entropy of a mean.

    What goes over the first dimension, of size one or put together with others, does so in a batch, too.
    """
    nodes = list(behind(loss.grad_fn, made))
    if any(takes_one(one, 1) for one in nodes):
        return False
    for node in nodes:
        below = [one for one, _ in node.next_functions]
        with_samples = [one is not None and torch_adapter.reaches(one, made) for one in below]
        kind = kind_of(node)
        straight = not all(with_samples) if kind == "Mul" else not any(with_samples[1:]) if kind == "Div" else False
        if straight or kind in (*_STRAIGHT, *SAME_VALUES):
            continue
        if any(_over_one(one, made) for root in below for one in behind(root, made)):
            return True
    return False


def _over_one(node: Any, made: set[int]) -> bool:
    """Return whether an operator adds up the only sample there is."""
    if kind_of(node) not in ("Mean", "Sum", "Nansum") and _reduction(node) not in (1, 2):
        return False
    merged = (
        kind_of(one) in _VIEWS and sizes_of(one)[:1] == (1,) != torch_adapter.result_sizes(one)[:1]
        for one in behind(node, made)
    )
    over = _over_samples(node, made, 1) or (_goes_over_first(node) and any(merged))
    return over and torch_adapter.reaches(node, made)


_VIEWS = ("View", "UnsafeView", "ReshapeAlias")
_STRAIGHT = ("Add", "Sub", "Rsub", "Sum", "Nansum", "Mean", "Stack", "Cat", "Select", "Slice", "Index")
_BENT = (
    "Abs", "Clamp", "ClampMin", "ClampMax", "Relu", "LeakyRelu", "Threshold", "Hardtanh", "Maximum", "Minimum",
    "L1Loss", "SmoothL1Loss", "HuberLoss",
)  # fmt: skip


def form_of(loss: torch.Tensor, made: set[int], samples: int) -> frozenset[Any]:
    """Return which operators a loss is made of beyond outputs, how often, which select, and which multiply by 0.

    Of one that the model has computed, with nothing beside it, they are the last few.
    """
    counts: dict[Any, int] = {}
    for node in itertools.islice(behind(loss.grad_fn, made), _OPERATORS if made else _FEW):
        selects = kind_of(node) in ("Index", "IndexSelect", "MaskedSelect", "Gather")
        one = node.name(), selects and torch_adapter.result_sizes(node)[:1] != (samples,), is_zeroed(node)
        counts[one] = min(counts.get(one, 0) + 1, _OFTEN)
    return frozenset(counts.items())


def _has_mean(root: Any, made: set[int], samples: int) -> bool:
    """Return whether a value was computed from a sum or mean over the samples of a batch."""
    for node in behind(root, made):
        reduces = kind_of(node) in ("Mean", "Sum", "Nansum") or _reduction(node) in (1, 2)
        adds = _adds_samples(node, samples) or (reduces and _over_samples(node, made, samples))
        if adds and torch_adapter.reaches(node, made):
            return True
    return False


def _adds_samples(node: Any, samples: int) -> bool:
    """Return whether an operator adds up samples by groups: a product with their indicators, or by an index."""
    sizes = sizes_of(node)
    if kind_of(node) in ("Mv", "Mm"):
        return sizes[1:] == (samples,) and sizes[0] % samples != 0
    if kind_of(node) not in ("IndexAdd", "ScatterAdd", "ScatterReduce"):
        return False
    return len(node._saved_index) == samples != torch_adapter.result_sizes(node)[0]


def _of_others(rows: torch.Tensor, samples: int) -> torch.Tensor:
    """Return the rows that are not of the first sample, whether its rows lie side by side or one in each view."""
    others = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    others[: len(rows) // samples] = others[::samples] = False
    return rows[others]


def sums_of_samples(loss: torch.Tensor, made: set[int], samples: int) -> Literal["", "sum", "weights", "small"]:
    """Return whether a term of a loss is a sum over samples: each rank's is a part of it, and not its like.

    A sum over parameters alone is each rank's.

    Returns:
        "sum"; "weights" for a mean whose weights the program has made add up to one, so that nothing tells by how much
        they weigh more on another rank; "small" for a sum times less than a mean is, which may be a coefficient or one
        divided by a count; "" for none of them, and for what is not known.
    """
    small: Literal["", "small"] = ""
    singles = 0.0
    taken = list[Term]()
    for term in _terms(loss, samples):
        node, factor, divisor = term.node, term.factor, term.divisor
        if not is_sum(node):
            singles += term.scale if torch_adapter.reaches(node, made) and is_of_one(node, samples) else 0.0
            taken += [term] if takes_one(node, samples) else []
            continue
        features = kind_of(node) in _DOTS and math.prod(sizes_of(node)) % max(1, samples)
        if divisor is not None or features or is_empty(node):
            continue
        if not (reaches := torch_adapter.reaches(node, made)) and not _of_gradients(node, samples):
            continue
        if reaches and samples > 1 and _adds_up_means(node, made, samples):
            continue
        if kind_of(node) in _DOTS and any(_has_mean(one, made, samples) for one, _ in node.next_functions if one):
            continue  # `einsum("c,c->", output.mean(0), weights)` goes over features
        if factor * samples <= 1.001:
            means = (samples, math.prod(sizes_of(node)))
            small = small if any(abs(factor * one - 1) < 1e-3 for one in means) else "small"
            continue
        weights = _weights(node)
        if weights is None or not weights.is_floating_point() or abs(weights.sum() - 1) > 1e-3:  # or a mask
            return "sum"
        if weights.max() - weights.min() > 1e-3 * weights.max():
            return "weights"
    if taken and _takes_each(taken, made, samples):
        factor = min(one.factor for one in taken)
        if factor == 1 or (taken[0].counts_whole and factor * samples > 1.001):
            return "sum"
        small = small if factor * samples > 0.999 else "small"
    return "sum" if singles > 1.001 and abs(singles - samples) < 1e-3 * samples else small


def _of_gradients(node: Any, samples: int) -> bool:
    """Return whether a sum goes over gradients by samples, which come from within the model and not from its outputs.

    So do those of `torch.autograd.grad(output.sum(), inputs, create_graph=True)`: `gradient.norm() ** 2`.
    """
    if kind_of(node) == "Pow":
        node = node.next_functions[0][0]
    if samples < 2 or sizes_of(node)[:1] != (samples,):
        return False
    todo, seen = deque([node]), set[Any]()
    trained = given = False
    while todo and len(seen) < _OPERATORS:
        one = todo.popleft()
        if one is None or one in seen:
            continue
        seen.add(one)
        todo += [below for below, _ in one.next_functions]
        if one.name().endswith("AccumulateGrad"):
            trained |= isinstance(one.variable, torch.nn.Parameter)
            given |= not isinstance(one.variable, torch.nn.Parameter) and one.variable.shape[:1] == (samples,)
        if "BackwardBackward" in one.name() or (trained and given):
            return True
    return False


def _takes_each(taken: Sequence[Term], made: set[int], samples: int) -> bool:
    """Return whether terms are all of a vector that has a loss for each sample, as of Python's `sum(losses)`."""
    if samples < 2 or len(taken) % samples or any(one.divisor is not None for one in taken):
        return False
    vectors = {below for one in taken for below, _ in one.node.next_functions if below is not None}
    divisors = [scaled_by(one)[0] for one in vectors if kind_of(one) == "Div"]
    if any(by is not None and by.numel() == 1 and float(by) == samples for by in divisors):
        return False  # `sum(losses / len(batch))`
    return all(torch_adapter.reaches(one, made) and not _has_mean(one, made, samples) for one in vectors)


def _adds_up_means(node: Any, made: set[int], samples: int) -> bool:
    """Return whether all that a sum adds up was computed from means over samples.

    So it is of several losses that learned weights multiply: `(losses * (-s).exp() + s).sum()`.
    """
    todo, seen = [one for one, _ in node.next_functions], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen or not torch_adapter.reaches(node, made):
            continue
        seen.add(node)
        below = [one for one, _ in node.next_functions if one is not None]
        single = math.prod(torch_adapter.result_sizes(node)) == 1
        if single and (kind_of(node) == "Mean" or _reduction(node) == 1) and not is_of_one(node, samples):
            continue
        if single and kind_of(node) == "Div" and is_sum(below[0]):
            continue
        if node._sequence_nr() in made or (single and any(math.prod(torch_adapter.result_sizes(o)) > 1 for o in below)):
            return False
        todo += below
    return True


_RANKING = (
    "Topk", "Sort", "Max", "Min", "Amax", "Amin", "Aminmax", "Median", "Nanmedian", "Kthvalue", "Mode", "Cummax",
    "Cummin",
)  # fmt: skip


def samples_compete(loss: torch.Tensor, made: set[int], samples: int) -> str:
    """Return the operator by which a loss ranks the samples of a batch (hard examples, a maximum); "" for none.

    The largest of a rank's samples are not those of the batch, and no derivative shows it. What the model does inside
    is not looked at.
    """
    for node in behind(loss.grad_fn, made):
        kind = kind_of(node)
        ranks = kind in _RANKING and _over_samples(node, made, samples) and torch_adapter.reaches(node, made)
        if ranks and not any(takes_one(one, samples) for one in behind(node, made)):
            return kind.lower()
    return ""


def behind(root: Any, made: set[int]) -> Iterator[Any]:
    """Yield the operators from the root, of a loss say, to the model's outputs, whose places are `made`; each once."""
    todo, seen = deque([root]), set[Any]()
    while todo:
        node = todo.popleft()  # all terms of a loss before what they were computed from
        if node is None or node in seen or node._sequence_nr() in made:
            continue
        seen.add(node)
        yield node
        todo += [one for one, _ in node.next_functions]


def is_listed(loss: torch.Tensor, made: set[int]) -> bool:
    """Return whether something is put together in a loss of which there is one now: `torch.stack(losses).mean()`."""
    return any(kind_of(one) in ("Stack", "Cat") and len(one.next_functions) == 1 for one in behind(loss.grad_fn, made))


def _saved_dims(node: Any) -> tuple[int, ...]:
    dims = getattr(node, "_saved_dim", None)
    return () if dims is None else dims if isinstance(dims, tuple) else (dims,)


def _goes_over_first(node: Any) -> bool:
    count = len(sizes_of(node))
    return not _saved_dims(node) or any(dim in (0, -count, 2**64 - count) for dim in _saved_dims(node))


def _over_samples(node: Any, made: set[int], samples: int) -> bool:
    """Return whether an operator goes over the first dimension, and that is one of samples."""
    sizes, dims, first = sizes_of(node), _saved_dims(node), _goes_over_first(node)
    if not sizes or not samples:
        return False
    flat = len(sizes) == 1 or not dims
    rows = _selected_from(node, made)
    if rows is not None:
        return first and samples > 1 and rows % samples == 0
    return first and (sizes[0] == samples or (flat and samples > 1 and math.prod(sizes) % samples == 0))


def _selected_from(node: Any, made: set[int]) -> int | None:
    """Return of how many rows those that an operator goes over were selected, by a mask say; None where all are."""
    for _ in range(_FAR):
        node, selects = next((one for one, _ in node.next_functions if one is not None), None), kind_of(node)
        if node is None:
            break
        if selects in ("Index", "IndexSelect", "MaskedSelect"):
            return next(iter(torch_adapter.result_sizes(node)), None)
        if node._sequence_nr() in made:
            break
    return None


def scale_of_means(loss: torch.Tensor, made: set[int], samples: int, *, learned: bool = True) -> tuple[float, ...]:
    """Return by what a loss multiplies its means over the model's outputs; also by parameters, if `learned`."""
    found: list[float] = []
    parts = [] if is_one_by_one(loss, samples) else list(_terms(loss, samples))
    for one in parts:
        mean = one.node.name() == "MeanBackward0" or _reduction(one.node) == 1
        if mean and torch_adapter.reaches(one.node, made) and (learned or not one.learned):
            # `(losses * mask).mean() / mask.mean()` divides by a count, and `/ mask.sum()` by one too many.
            share = one.divisor is not None and one.divisor.is_floating_point() and not is_plain(one.divisor)
            by = None if len(parts) == 1 and share else one.divisor
            found.append(one.factor / one.more if by is None else one.scale)
    return tuple(found)


def constant_divisors(loss: torch.Tensor, samples: int, total: int) -> set[float]:
    """Return by what numbers of the program a loss divides sums that are none of this rank's samples or elements.

    They may be counts all the same. `total` is the size of the global batch. Losses of single samples that the program
    adds up itself (`sum(losses) / 3`) are such a sum, where each sample has as many.
    """
    found = set()
    parts = list(_terms(loss, samples))
    apart = samples > 1 and not sum(is_taken(one.node, samples) for one in parts) % samples
    for one in parts:
        adds = is_sum(one.node) or (apart and is_taken(one.node, samples))
        divisor = one.divisor if samples and adds else None
        by = 0.0 if divisor is None or not is_plain(divisor) else abs(float(divisor))
        if by % max(1, samples) and (one.again or one.counts_whole):  # by a constant and a count, neither of samples
            by = 1 / one.scale
        if by not in (0.0, samples):
            elements = math.prod(sizes_of(one.node))
            # A trace is one of a product, whose terms are summed, too.
            known = elements % samples == 0 and kind_of(one.node) != "Trace"
            of_features = elements % by == 0 if known else True
            found |= {by} if by != elements and (by == total or by % samples or not of_features) else set()
    return found


def _terms(loss: torch.Tensor, samples: int) -> Iterator[Term]:
    """Yield the terms of a loss that count."""
    return (one for one in terms(loss, samples) if one.node is not None and math.isfinite(one.factor) and one.factor)


def _reduction(node: Any) -> Any:
    return getattr(node, "_saved_reduction", None)


def _weights(node: Any) -> torch.Tensor | None:
    """Return the tensor without gradient that is multiplied with what is summed; None where there is none."""
    if kind_of(node) in _DOTS:
        return _factor(node)
    below = node.next_functions[0][0]
    while below is not None and kind_of(below) in SAME_VALUES:
        below = below.next_functions[0][0]
    return None if below is None or kind_of(below) != "Mul" else _factor(below)


def _factor(node: Any) -> torch.Tensor | None:
    """Return the factor of a product that has no gradient."""
    if all(one is not None for one, _ in node.next_functions):
        return None
    found = (
        getattr(node, name, None)
        for name in ("_saved_other", "_saved_tensor", "_saved_mat2", "_saved_vec", "_saved_self")
    )
    return next((one.detach() for one in found if isinstance(one, torch.Tensor) and one.numel() > 1), None)
