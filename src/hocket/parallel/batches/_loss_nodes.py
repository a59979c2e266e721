"""What single operators of a loss's graph go over, and whether they add up, take some, or count anything."""

import math
from typing import Any

import torch

from hocket.comm import torch_adapter

SAME_VALUES = (
    "Neg", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias", "Clone", "Expand",
    "Permute", "NanToNum", "_ScaledByHocket",
)  # fmt: skip
SUMS = (
    "SumBackward0", "SumBackward1", "NansumBackward0", "NansumBackward1", "DotBackward0", "VdotBackward0",
    "TraceBackward0",
)  # fmt: skip
"""Sums where the result is a scalar, also of products: `losses.sum(0)`, `losses @ mask`, `trace(a @ a.T)`."""
PRODUCTS = ("MvBackward0", "MmBackward0", "BmmBackward0")  # what einsum makes sums of
OVER_RANKS = "_Total"  # the sum over the parts of samples that spatial parallelism has divided
MEANS = ("MeanBackward0", "MeanBackward1")
_ELEMENTWISE = ("Add", "Sub", "Rsub", "Mul", "Div", "Pow", "Where", "MaskedFill")
_LOOK_UPS = ("Embedding", "Index", "Gather", "Take", "MaskedSelect", "Scatter", "CtcLoss")
LAYERS = ("Addmm", "Convolution", "Native", "ScaledDot")  # of models, which are given samples: no need to look below
CHAIN = 16
MOST = 4096
"""Operators that are looked at, at most: a loss of more is not known."""


def kind_of(node: Any) -> str:
    """Return the name of an operator in the graph, without what torch adds; of a program's own function all of it.

    Torch numbers its own ("MulBackward0"): a function that a program calls Mul keeps nothing of what torch's keeps.
    """
    name: str = node.name()
    own = name.endswith("Backward") and not name.startswith("_")
    return name if own else name.rstrip("01").removesuffix("Backward")


def is_sum(node: Any) -> bool:
    """Return whether an operator that gives a scalar adds up what it goes over, or products or powers of that."""
    known = getattr(node, "_saved_reduction", None) == 2 or node.name() in (*SUMS, *PRODUCTS)
    return known or _is_power_of_norm(node) or _is_square_of_norm(node)


def _is_power_of_norm(node: Any) -> bool:
    """Return whether a scalar is a norm to the power of its order: `(output - target).norm() ** 2`, `x.norm(1)`."""
    power = node.name() == "PowBackward0"
    exponent, norm = (node._saved_exponent, node.next_functions[0][0]) if power else (1, node)
    kind = "" if norm is None else kind_of(norm)
    if kind not in ("LinalgVectorNorm", "Dist") or size_of(norm) > 1:
        return False
    below = norm.next_functions[0][0]
    scale = scaled_by(below)[0] if below is not None and kind_of(below) in ("Mul", "Div") else None
    return bool((norm._saved_p if kind == "Dist" else norm._saved_ord) == exponent) and (
        scale is None or scale.numel() > 1
    )


def _is_square_of_norm(node: Any) -> bool:
    """Return whether a scalar is a product of two norms: `norm * norm`. Samples meet where these are not the same."""
    below = [one for one, _ in node.next_functions]
    if node.name() != "MulBackward0" or None in below or size_of(node) > 1:
        return False
    return all(kind_of(one) == "LinalgVectorNorm" and size_of(one) == 1 and one._saved_ord == 2 for one in below)


def scaled_by(node: Any) -> tuple[torch.Tensor | None, Any]:
    """Return what a product or quotient multiplies with, or divides by, and the rest; None where both have samples."""
    first, second = [*(one for one, _ in node.next_functions), None][:2]
    found: Any = (None, None)
    if first is not None and (second is None or of_parameters(second)):
        found = node._saved_other, first
    elif second is not None and kind_of(node) == "Mul" and (first is None or of_parameters(first)):
        found = node._saved_self, second
    by, rest = found
    return (None, None) if by is None else (torch.as_tensor(by).detach(), rest)


def is_zeroed(node: Any) -> bool:
    """Return whether an operator multiplies by a number that is 0 now: no derivative shows what is below."""
    if kind_of(node) != "Mul" or len(below := [one for one, _ in node.next_functions]) != 2:
        return False
    by = getattr(node, "_saved_self" if below[0] is None else "_saved_other", None) if None in below else None
    return isinstance(by, torch.Tensor) and by.numel() == 1 and not bool(by.any())


def is_plain(divisor: torch.Tensor) -> bool:
    """Return whether something is a number of Python, and was no tensor in the program."""
    probe = torch.zeros((), dtype=torch.float16 if divisor.is_floating_point() else torch.int16)
    return torch.result_type(probe, divisor) == probe.dtype


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


def dims_of(node: Any) -> tuple[int, ...]:
    """Return over which dims of at least two an operator goes, if not over all; () for a scalar result."""
    dims, count = getattr(node, "_saved_dim", ()), len(sizes_of(node))
    dims = dims if isinstance(dims, tuple) else (dims,)
    return tuple((dim - 2**64 if dim >= 2**63 else dim) % count for dim in dims) if count > 1 else ()


def elements_of(node: Any) -> int:
    """Return how many elements a sum, mean or product goes over; 0 where that is not known."""
    return math.prod(sizes_of(node)) if sizes_of(node) else 0


def size_of(node: Any) -> int:
    """Return the elements of an operator's result."""
    return math.prod(torch_adapter.result_sizes(node))


def dotted_with(node: Any) -> tuple[torch.Tensor | None, Any]:
    """Return what a product of vectors multiplies with, and the other; None where both have a gradient."""
    first, second = (one for one, _ in node.next_functions)
    if first is None or second is None:
        other = "_saved_other" if kind_of(node) == "Vdot" else "_saved_tensor"
        return (node._saved_self, second) if first is None else (getattr(node, other), first)
    return None, None


def is_of_one(node: Any, samples: int) -> bool:
    """Return whether a loss may be that of a single sample: what it goes over is no multiple of samples."""
    odd = False
    for _ in range(CHAIN if samples > 1 else 0):
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


def is_taken(node: Any, samples: int | None) -> bool:
    """Return whether a loss is of one sample that was taken from all, and not one of several put together."""
    for _ in range(CHAIN):
        if node is None or kind_of(node) in ("Stack", "Cat"):
            return False
        if takes_one(node, samples):
            return True
        node = next((one for one, _ in node.next_functions if one is not None), None)
    return False


def of_scalar(node: Any, samples: int | None = None) -> Any:
    """Return the loss that a sum or mean leaves as it is, for it goes over that alone (`loss.mean()`); else None.

    The loss of one sample that was taken from all is none: the mean over as many as there are divides by samples.
    """
    if node.name() not in (*SUMS, *MEANS) or len(node.next_functions) != 1:
        return None
    below = node.next_functions[0][0]
    while below is not None and math.prod(torch_adapter.result_sizes(below)) == 1:
        if not torch_adapter.result_sizes(below):
            return None if is_taken(below, samples) else below
        if kind_of(below) not in (*SAME_VALUES, "Stack", "Cat") or len(below.next_functions) != 1:
            return None
        below = below.next_functions[0][0]
    return None


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
        if len(seen) > MOST or kind.startswith((*_LOOK_UPS, *LAYERS)) or hasattr(node, "_saved_target"):
            return False
        if not any(below):
            return False
        if None in below and (kind not in _ELEMENTWISE or size_of(node) > max(size_of(one) for one in below if one)):
            return False
        todo += below
    return True


def mask_of(node: Any) -> torch.Tensor | None:
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


def is_empty(node: Any, divisor: torch.Tensor | None = None) -> bool:
    """Return whether all that is summed is masked or ignored, and what it is divided by is then no count.

    A program divides by `mask.sum().clamp(min=1)`, say. A number may be `len(batch)` where there is one sample.
    """
    no_count, summed = divisor is None or not is_plain(divisor), False
    while node is not None:
        node = of_scalar(node) or node
        kind, below = kind_of(node), [one for one, _ in node.next_functions]
        sizes = tuple(getattr(node, "_saved_self_sym_sizes", ()))
        no_count |= sizes[:1] > (1,)
        summed |= kind in ("Sum", "Nansum")
        if kind == OVER_RANKS:  # what is masked here need not be so on other ranks, but the sum is theirs, too
            return no_count and node.summed is not None and not bool(node.summed)
        if kind in ("NllLoss", "NllLoss2D"):
            ignored = (node._saved_ignore_index + 2**63) % 2**64 - 2**63
            kept = node._saved_target != ignored
        elif (kept := mask_of(node)) is None and not (
            kind in ("Sum", "Nansum", *SAME_VALUES) or (kind == "Div" and summed and None in below)
        ):
            return False
        if 0 in sizes or (kept is not None and not bool(kept.any())):
            return no_count or (kept is not None and kept.shape[:1] > (1,))
        node = next((one for one in below if one is not None), None)
    return False
