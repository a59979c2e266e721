"""What the graph of automatic differentiation tells of a loss: its terms, and what each of them divides by."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hocket.comm import torch_adapter

SAME_VALUES = (
    "Neg", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias", "Clone", "Expand",
    "Permute", "NanToNum", "_ScaledByHocket",
)  # fmt: skip
SUMS = ("SumBackward0", "SumBackward1", "NansumBackward0", "NansumBackward1", "DotBackward0", "VdotBackward0")
"""Sums where the result is a scalar, also of products: `losses.sum(0)`, `losses @ mask`."""
_PRODUCTS = ("MvBackward0", "MmBackward0", "BmmBackward0")  # what einsum makes sums of
_OVER_RANKS = "_Total"  # the sum over the parts of samples that spatial parallelism has divided
_SUM = -1.0  # the count of a term that divides by nothing
_MEANS = ("MeanBackward0", "MeanBackward1")
_ELEMENTWISE = ("Add", "Sub", "Rsub", "Mul", "Div", "Pow", "Where", "MaskedFill")
_LOOK_UPS = ("Embedding", "Index", "Gather", "Take", "MaskedSelect", "Scatter", "CtcLoss")
_LAYERS = ("Addmm", "Convolution", "Native", "ScaledDot")  # of models, which are given samples: no need to look below
_LEAST_INVERSE = 1e-6  # one divided by more than a million is a whole number's inverse by rounding alone
_CHAIN = 16
_MOST = 4096
"""Operators that are looked at, at most: a loss of more is not known."""


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
    if is_empty(loss.grad_fn):
        return (0.0,)
    parts = terms(loss, samples)
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


def wholes(loss: torch.Tensor, samples: int) -> tuple[int, ...]:
    """Return the numbers n of all factors of a loss's terms that are 1/n."""
    return tuple(n for one in terms(loss, samples) for n in one.wholes)


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
    if _elements(root) == 1:
        return False
    nothing, todo = None, [root]
    for _ in range(4 * _CHAIN):
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
            kept = _mask(node)
        elif kind in ("Index", "MaskedSelect"):
            if torch_adapter.result_sizes(node)[:1] == (1,):
                return False
            continue
        if kept is not None and kept.numel() > 1 and float(kept.sum()) == 1:
            return False
        if not kind.startswith(_LAYERS):
            todo += below
    return nothing


def _mask(node: Any) -> torch.Tensor | None:
    """Return what an operator multiplies with, or which elements it keeps; None where that is not known."""
    kind, below = kind_of(node), [one for one, _ in node.next_functions]
    if kind in ("Mul", "Dot") and None in below:
        found = (getattr(node, f"_saved_{name}", None) for name in ("other", "tensor", "self"))
        return next((one for one in found if isinstance(one, torch.Tensor)), None)
    if kind in ("MaskedFill", "MaskedSelect"):
        return ~node._saved_mask if kind == "MaskedFill" else node._saved_mask  # type: ignore[no-any-return]
    if kind == "Where" and None in below:
        return node._saved_condition if below[0] is not None else ~node._saved_condition  # type: ignore[no-any-return]
    return None


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
    if node.name() in _MEANS:
        return float(node._saved_self_sym_numel)
    if getattr(node, "_saved_reduction", None) == 1 and hasattr(node, "_saved_self"):
        nll = kind_of(node) in ("NllLoss", "NllLoss2D")
        return float(node._saved_total_weight if nll else node._saved_self.numel())
    return None


def is_sum(node: Any) -> bool:
    """Return whether an operator that gives a scalar adds up what it goes over, or products or powers of that."""
    known = getattr(node, "_saved_reduction", None) == 2 or node.name() in (*SUMS, *_PRODUCTS)
    return known or _is_power_of_norm(node)


def _is_power_of_norm(node: Any) -> bool:
    """Return whether a scalar is a norm to the power of its order: `(output - target).norm() ** 2`, `x.norm(1)`."""
    power = node.name() == "PowBackward0"
    exponent, norm = (node._saved_exponent, node.next_functions[0][0]) if power else (1, node)
    kind = "" if norm is None else kind_of(norm)
    if kind not in ("LinalgVectorNorm", "Dist") or _size(norm) > 1:
        return False
    below = norm.next_functions[0][0]
    scale = _scaled(below)[0] if below is not None and kind_of(below) in ("Mul", "Div") else None
    return bool((norm._saved_p if kind == "Dist" else norm._saved_ord) == exponent) and (
        scale is None or scale.numel() > 1
    )


def terms(loss: torch.Tensor, samples: int | None = None) -> list[Term]:
    """Return what a loss adds up, but for what is computed of parameters alone.

    A sum or mean of losses that the program has put together (`torch.stack([a, b]).mean()`) is taken apart, and so is
    one over what was summed, or averaged, over the samples before (`losses.mean(0).sum()`).
    """
    found: list[Term] = []
    todo = [Term(loss.grad_fn, 1.0, None)]
    for _ in range(_MOST):
        if not todo:
            break
        term = todo.pop()
        node, kind = term.node, kind_of(term.node)
        below = [one for one, _ in node.next_functions if one is not None]
        by, scaled = _scaled(node) if kind in ("Mul", "Div") else (None, None)
        same = kind in (*SAME_VALUES, _OVER_RANKS) or (kind == "Select" and _is_of_product(below))
        if kind in ("Add", "Sub") or (same and len(below) == 1):
            todo += [replace(term, node=one) for one in reversed(below)]
        elif scalar := _of_scalar(node, samples):
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
            found.append(term)
    if todo:
        return [Term(None, 1.0, None)]
    return found if len(found) == 1 else [one for one in found if not of_parameters(one.node)]


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


def _inverse(term: Term, factor: torch.Tensor) -> Term:
    """Return a term that is multiplied by a number, and whether that is one divided by a whole number."""
    number = abs(float(factor))
    whole = round(1 / number) if number > _LEAST_INVERSE else 0
    rounding = 2 * torch.finfo(factor.dtype).eps if factor.is_floating_point() else 0.0
    if not whole or abs(number * whole - 1) > rounding:
        return term
    first = term.inverse is None or not is_plain(factor)
    return replace(term, inverse=factor if first else term.inverse, wholes=(*term.wholes, whole))


def kind_of(node: Any) -> str:
    """Return the name of an operator in the graph, without what torch adds; of a program's own function all of it.

    Torch numbers its own ("MulBackward0"): a function that a program calls Mul keeps nothing of what torch's keeps.
    """
    name: str = node.name()
    own = name.endswith("Backward") and not name.startswith("_")
    return name if own else name.rstrip("01").removesuffix("Backward")


def is_zeroed(node: Any) -> bool:
    """Return whether an operator multiplies by a number that is 0 now: no derivative shows what is below."""
    if kind_of(node) != "Mul" or len(below := [one for one, _ in node.next_functions]) != 2:
        return False
    by = getattr(node, "_saved_self" if below[0] is None else "_saved_other", None) if None in below else None
    return isinstance(by, torch.Tensor) and by.numel() == 1 and not bool(by.any())


def _scaled(node: Any) -> tuple[torch.Tensor | None, Any]:
    """Return what a product or quotient multiplies with, or divides by, and the rest; None where both have samples."""
    first, second = [*(one for one, _ in node.next_functions), None][:2]
    found: Any = (None, None)
    if first is not None and (second is None or of_parameters(second)):
        found = node._saved_other, first
    elif second is not None and kind_of(node) == "Mul" and (first is None or of_parameters(first)):
        found = node._saved_self, second
    by, rest = found
    return (None, None) if by is None else (torch.as_tensor(by).detach(), rest)


def _is_of_product(below: Sequence[Any]) -> bool:
    """Return whether a value is that of a product of one element: `(losses[None] @ mask)[0]`."""
    one = below[0]
    while kind_of(one) == "Select" and one.next_functions[0][0] is not None:
        one = one.next_functions[0][0]
    return one.name() in _PRODUCTS and _size(one) == 1


def _parts(node: Any, samples: int | None) -> list[tuple[Any, float, torch.Tensor | None]]:
    """Return what a sum or mean goes over, if that was put together or is of all samples, with factors and divisors."""
    kind, size = kind_of(node), _elements(node)
    if node.name() not in (*SUMS, *_MEANS) or not size:
        return []
    factors = torch.full((size,), 1.0 / size if kind == "Mean" else 1.0, dtype=torch.float64)
    divided: torch.Tensor | None = None
    below = node
    while True:
        kind = kind_of(below)
        if kind in ("Dot", "Vdot", "Mul", "Div"):
            by, rest = _dotted(below) if kind in ("Dot", "Vdot") else _scaled(below)
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
        if each or all(_is_taken(one, samples) for one in inner) or size < 2 or len(inner) != size or None in inner:
            return []
        counts: list[torch.Tensor | None] = [None] * size if divided is None else list(divided)
        return [(one, f, d) for one, f, d in zip(inner, factors.tolist(), counts, strict=True)]
    sizes = tuple(getattr(below, "_saved_self_sym_sizes", ()))
    if kind not in ("Mean", "Sum", "Nansum") or 0 not in _dims(below):
        return []
    if kind == "Mean":
        return [(below, float((factors if divided is None else factors / divided).sum()), None)]
    if inner[0] is None or kind_of(inner[0]) == "Stack" or not samples or sizes[0] % samples:
        return []
    if divided is None:  # the mean of sums over samples is a sum, whatever else it goes over
        return [(below, float(factors.mean()) * (size if node.name() in _MEANS else 1), None)]
    return [(below, f, d) for f, d in zip(factors.tolist(), divided, strict=True)]


def _of_scalar(node: Any, samples: int | None = None) -> Any:
    """Return the loss that a sum or mean leaves as it is, for it goes over that alone (`loss.mean()`); else None.

    The loss of one sample that was taken from all is none: the mean over as many as there are divides by samples.
    """
    if node.name() not in (*SUMS, *_MEANS) or len(node.next_functions) != 1:
        return None
    below = node.next_functions[0][0]
    while below is not None and math.prod(torch_adapter.result_sizes(below)) == 1:
        if not torch_adapter.result_sizes(below):
            return None if _is_taken(below, samples) else below
        if kind_of(below) not in (*SAME_VALUES, "Stack", "Cat") or len(below.next_functions) != 1:
            return None
        below = below.next_functions[0][0]
    return None


def _of_samples(node: Any) -> list[Any]:
    """Return what an operator goes over that has a gradient, but for what is made of parameters alone."""
    return [one for one, _ in node.next_functions if one is not None and not of_parameters(one)]


def _dotted(node: Any) -> tuple[torch.Tensor | None, Any]:
    """Return what a product of vectors multiplies with, and the other; None where both have a gradient."""
    first, second = (one for one, _ in node.next_functions)
    if first is None or second is None:
        other = "_saved_other" if kind_of(node) == "Vdot" else "_saved_tensor"
        return (node._saved_self, second) if first is None else (getattr(node, other), first)
    return None, None


def _elements(node: Any) -> int:
    """Return how many elements a sum, mean or product goes over; 0 where that is not known."""
    return math.prod(sizes_of(node)) if sizes_of(node) else 0


def sizes_of(node: Any) -> tuple[int, ...]:
    """Return the shape of what an operator goes over, as far as it is known; of a product that of either factor."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is None:
        found = (
            getattr(node, name, None)
            for name in ("_saved_self", "_saved_other", "_saved_tensor", "_saved_mat2", "_saved_vec")
        )
        sizes = next((one.shape for one in found if isinstance(one, torch.Tensor)), ())
    return tuple(sizes)


def _dims(node: Any) -> tuple[int, ...]:
    """Return over which dims of at least two an operator goes, if not over all; () for a scalar result."""
    dims, count = getattr(node, "_saved_dim", ()), len(sizes_of(node))
    dims = dims if isinstance(dims, tuple) else (dims,)
    return tuple((dim - 2**64 if dim >= 2**63 else dim) % count for dim in dims) if count > 1 else ()


def is_of_one(node: Any, samples: int) -> bool:
    """Return whether a loss may be that of a single sample: what it goes over is no multiple of samples."""
    odd = False
    for _ in range(_CHAIN if samples > 1 else 0):
        if node is None:
            break
        kind, sizes = kind_of(node), sizes_of(node)
        if kind in ("Index", "IndexSelect", "MaskedSelect"):  # what is not masked, perhaps
            return False
        reduces = hasattr(node, "_saved_reduction") or kind in ("Mean", "Sum", "Nansum")
        odd |= reduces and bool(sizes) and sizes[0] % samples != 0
        node = next((one for one, _ in node.next_functions if one is not None), None)
    return odd


def takes_one(node: Any, samples: int | None) -> bool:
    """Return whether an operator takes one sample from all of a rank, or takes all apart; from any number if None."""
    kind = kind_of(node)
    if kind not in ("Select", "Slice", "Unbind", "Split", "SplitWithSizes") or node._saved_dim != 0:
        return False
    if kind == "Slice" and torch_adapter.result_sizes(node)[0] != 1:
        return False
    size = sizes_of(node)[0] if kind in ("Select", "Slice") else len(node._input_metadata)
    return samples is None or bool(size == samples)


def _is_taken(node: Any, samples: int | None) -> bool:
    """Return whether a loss is of one sample that was taken from all, and not one of several put together."""
    for _ in range(_CHAIN):
        if node is None or kind_of(node) in ("Stack", "Cat"):
            return False
        if takes_one(node, samples):
            return True
        node = next((one for one, _ in node.next_functions if one is not None), None)
    return False


def is_one_by_one(loss: torch.Tensor, samples: int) -> bool:
    """Return whether a loss adds up those of single samples, each of which may be a mean over something else."""
    found = terms(loss, samples) if samples else []
    if len(found) < samples:
        return False
    known = [one for one in found if one.node]
    quotients = [one for one in known if one.again or not is_sum(one.node)]
    return any(is_of_one(one.node, samples) for one in known) or any(_is_taken(one.node, samples) for one in quotients)


def of_parameters(root: Any) -> bool:
    """Return whether an operator's result is made of parameters and constants, and not of samples.

    Samples have no gradient: they come in by products with such a tensor, by look-ups, and by what makes a parameter
    larger.
    """
    seen: set[Any] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad"):
            if not isinstance(node.variable, torch.nn.Parameter):
                return False
            continue
        kind, below = kind_of(node), [one for one, _ in node.next_functions]
        if len(seen) > _MOST or kind.startswith((*_LOOK_UPS, *_LAYERS)) or hasattr(node, "_saved_target"):
            return False
        if not any(below):
            return False
        if None in below and (kind not in _ELEMENTWISE or _size(node) > max(_size(one) for one in below if one)):
            return False
        todo += below
    return True


def _size(node: Any) -> int:
    """Return the elements of an operator's result."""
    return math.prod(torch_adapter.result_sizes(node))


def is_plain(divisor: torch.Tensor) -> bool:
    """Return whether something is a number of Python, and was no tensor in the program."""
    probe = torch.zeros((), dtype=torch.float16 if divisor.is_floating_point() else torch.int16)
    return torch.result_type(probe, divisor) == probe.dtype


def is_empty(node: Any, divisor: torch.Tensor | None = None) -> bool:
    """Return whether all that is summed is masked or ignored, and what it is divided by is then no count.

    A program divides by `mask.sum().clamp(min=1)`, say. A number may be `len(batch)` where there is one sample.
    """
    no_count = divisor is None or not is_plain(divisor)
    while node is not None:
        node = _of_scalar(node) or node
        kind, below = kind_of(node), [one for one, _ in node.next_functions]
        sizes = tuple(getattr(node, "_saved_self_sym_sizes", ()))
        no_count |= sizes[:1] > (1,)
        if kind == _OVER_RANKS:  # what is masked here need not be so on other ranks, but the sum is theirs, too
            return no_count and node.summed is not None and not bool(node.summed)
        if kind in ("NllLoss", "NllLoss2D"):
            ignored = (node._saved_ignore_index + 2**63) % 2**64 - 2**63
            kept = node._saved_target != ignored
        elif (kept := _mask(node)) is None and kind not in ("Sum", "Nansum", *SAME_VALUES):
            return False
        if 0 in sizes or (kept is not None and not bool(kept.any())):
            return no_count or (kept is not None and kept.shape[:1] > (1,))
        node = next((one for one in below if one is not None), None)
    return False
