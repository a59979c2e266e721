"""Rules of operators along one dim or several: sums, means, extrema, softmax, sorting; and of losses.

Sums and means over the divided dim are added up over ranks where these exchange partial results; over other dims
everything stays divided.
"""

import inspect
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ._call import Local, Operand, OperatorCall, Outcome
from ._placement import REPLICATED
from ._pointwise import aligned, pointwise
from ._table import rule


class _Along(NamedTuple):
    """Where an operator has its dims."""

    place: int = 1  # the argument that tells the dims, counted from the input
    keepdim: int = 2  # the argument that tells whether dims stay as ones; 0 where the dims stay, -1 where they vanish
    default: int | None = None  # the dim where none is given; None for all


_STAY, _VANISH = 0, -1
_SOME_OR_ALL = """
sum mean amax amin argmax argmin max min all any prod logsumexp nansum nanmean median nanmedian mode
"""
_KEEPING = "softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp fft_c2c fft_r2c fft_c2r"
_ALONG = {
    **dict.fromkeys(_SOME_OR_ALL.split(), _Along()),
    **dict.fromkeys(_KEEPING.split(), _Along(1, _STAY)),
    **dict.fromkeys(["std", "var", "std_mean", "var_mean"], _Along(keepdim=3)),
    "norm": _Along(2, 3),
    "linalg_vector_norm": _Along(2, 3),
    "normalize": _Along(2, _STAY, 1),
    "sort": _Along(1, _STAY, -1),
    "argsort": _Along(1, _STAY, -1),
    "topk": _Along(2, _STAY, -1),
    "kthvalue": _Along(2, 3, -1),
    "cosine_similarity": _Along(2, _VANISH, 1),
    "count_nonzero": _Along(1, _VANISH),
}


def _along(
    call: OperatorCall, input: Operand, given: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[int], bool]:
    """Return the dims along which an operator works, from 0, and whether they stay."""
    about = _ALONG[call.name]
    dims = kwargs.get("dim", given[about.place - 1] if len(given) >= about.place else about.default)
    if isinstance(dims, Operand) or (call.name == "norm" and given[:1] == ("nuc",)):
        call.refuse("is given a tensor for a dim")
    if call.name in ("sort", "argsort") and isinstance(dims, bool):
        dims = -1
    if dims is None or isinstance(dims, bool) or dims in ((), []):
        dims = range(input.ndim)
    found = [d % max(input.ndim, 1) for d in ((dims,) if isinstance(dims, int) else dims)]
    if about.keepdim == _STAY:
        return found, True
    if about.keepdim == _VANISH:
        return found, False
    place = about.keepdim
    if call.name in ("std", "var", "std_mean", "var_mean") and given[:1] and isinstance(given[0], bool):
        return list(range(input.ndim)), False
    return found, bool(kwargs.get("keepdim", given[place - 1] if len(given) >= place else False))


@rule(*_ALONG.keys() - {"sum", "mean", "max", "min", "cosine_similarity"})
def along(call: OperatorCall, input: Any, *args: Any, **kwargs: Any) -> Outcome:
    """Return how results lie of operators along other dims than the divided one."""
    shard = call.alone(input) if call.name.startswith("fft_") else call.shard(input)
    dims, stay = _along(call, input, args, kwargs)
    if shard.dim in dims:
        call.refuse("works along the dim that is divided")
    return shard if stay else shard.at(shard.dim - sum(d < shard.dim for d in set(dims)))


@rule("max", "min")
def extremum(call: OperatorCall, input: Any, *args: Any, **kwargs: Any) -> Outcome:
    """Return how extrema lie: of two tensors, or of one along a dim."""
    if isinstance(kwargs.get("other", args[0] if args else None), Operand):
        return pointwise(call, input, *args, **kwargs)
    return along(call, input, *args, **kwargs)


@rule("cosine_similarity")
def cosine_similarity(call: OperatorCall, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Outcome:
    """Return how similarities of two tensors along another dim than the divided one lie."""
    (one, other), shard, ndim = aligned(call, (x1, x2))
    if x1.ndim != x2.ndim or dim % ndim == shard.dim:
        call.refuse("works along the dim that is divided")
    call.args, call.kwargs = (one, other, dim, eps), {}
    return shard.at(shard.dim - (dim % ndim < shard.dim))


@rule("sum", "mean")
def add_up(call: OperatorCall, input: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Outcome:
    """Return how sums and means lie: the same on all ranks, where the divided dim is among those added up."""
    shard = call.shard(input)
    dims, keepdim = _along(call, input, args, kwargs)
    if shard.dim not in dims:
        return shard if keepdim else shard.at(shard.dim - sum(d < shard.dim for d in set(dims)))
    call.exchange("adds up along the dim that is divided")
    count = 1 if call.name == "sum" else math.prod(input.shape[d] for d in dims)
    call.run = lambda local: totalled(local, local.tensors(input), count, dims, keepdim, dtype)
    return REPLICATED


def totalled(
    local: Local, tensor: torch.Tensor, count: float, dims: Any = None, keepdim: bool = False, dtype: Any = None
) -> torch.Tensor:
    """Return the sum over dims and ranks, divided by `count`; of halves in single precision, as torch adds them up."""
    made = tensor.dtype if dtype is None else dtype
    half = made in (torch.float16, torch.bfloat16)
    total = local.peers.total(tensor.sum(dims, keepdim, dtype=torch.float32 if half else dtype))
    total = total if count == 1 else total / count
    return torch.as_tensor(total.to(made) if half else total)


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
      "binary_cross_entropy_with_logits", "soft_margin_loss", "gaussian_nll_loss", "poisson_nll_loss")  # fmt: skip
def elementwise_loss(call: OperatorCall, *args: Any, **kwargs: Any) -> Outcome:
    """Return how a loss for each element lies, or their mean or sum over the full tensor."""
    values = _bound(call, args, kwargs)
    reduction = values.pop("reduction", "mean")
    if call.name in ("mse_loss", "l1_loss") and values.get("weight") is not None and reduction == "mean":
        call.refuse("divides by the sum of weights")
    if reduction not in ("none", "mean", "sum"):
        call.refuse("is called in a form that has no rule")
    if call.name == "gaussian_nll_loss" and len({one.ndim for one in call.operands()}) > 1:
        call.refuse("has variances of fewer dims")
    values, shard, _ = aligned(call, values)
    function: Any = getattr(F, call.name)
    if reduction == "none":
        call.args, call.kwargs, call.changed = (), {**values, "reduction": "none"}, True
        return shard
    call.exchange("adds up along the dim that is divided")
    operands = [o for o in call.operands() if o.ndim]
    shape = torch.broadcast_shapes(*(o.shape for o in operands))  # type: ignore[no-untyped-call]

    def run(local: Any) -> torch.Tensor:
        each = function(**local.tensors(values), reduction="none")
        return totalled(local, each, math.prod(shape) if reduction == "mean" else 1)

    call.run = run
    return REPLICATED


@rule("cross_entropy", "nll_loss")
def class_loss(call: OperatorCall, *args: Any, **kwargs: Any) -> Outcome:
    """Return how the loss of a score for each class, in dim 1, at each place lies.

    Weighted means are by the weights of the full tensor's targets, as torch has it.
    """
    values = _bound(call, args, kwargs)
    input, target = values["input"], values["target"]
    reduction, weight = values.pop("reduction", "mean"), values.pop("weight", None)
    ignored = values.get("ignore_index", -100)
    shard = call.shard(input)
    call.replicated(weight)
    classes = min(1, input.ndim - 1)
    if shard.dim == classes:
        call.refuse("works along the dim that is divided")
    soft = target.dtype.is_floating_point
    place = shard if soft or shard.dim < classes else shard.at(shard.dim - 1)
    values["target"] = call.share(target, place)
    function: Any = getattr(F, call.name)
    if reduction == "none":
        call.args, call.kwargs, call.changed = (), {**values, "weight": weight, "reduction": "none"}, True
        return shard.at(shard.dim - (shard.dim > classes))
    call.exchange("adds up along the dim that is divided")

    def run(local: Any) -> torch.Tensor:
        mine, by = local.tensors(values), local.tensors(weight)
        added = function(**mine, weight=by, reduction="sum")
        if reduction == "sum":
            return torch.as_tensor(local.peers.total(added))
        if soft:
            return torch.as_tensor(local.peers.total(added) / (math.prod(input.shape) / input.shape[classes]))
        counted = mine["target"][mine["target"] != ignored]
        divisor = counted.new_tensor(counted.numel()) if by is None else by[counted].sum()
        # Two sums, so that the graph tells what the loss divides by.
        return torch.as_tensor(local.peers.total(added) / local.peers.total(divisor.detach().to(added)))

    call.run = run
    return REPLICATED


def _bound(call: OperatorCall, args: Any, kwargs: Any) -> dict[str, Any]:
    function: Any = getattr(F, call.name)
    try:
        bound = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except TypeError:
        call.refuse("is called in a form that has no rule")
    for name in ("size_average", "reduce"):
        if bound.pop(name, None) is not None:
            call.refuse(f"is given the old argument {name}")
    return bound
