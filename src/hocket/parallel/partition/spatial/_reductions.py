"""Sums, means and losses: over the divided dim they are added up over ranks, over others they stay divided."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...batches import tensors_in
from ._elementwise import alike
from ._register import rule
from ._site import CannotDivide, Site, full_shape, note
from ._slabs import Slabs


def remaining(slabs: Slabs, ndim: int, dims: Sequence[int], keepdim: bool) -> Slabs:
    """How what is left is divided after a reduction over dims, the divided one not among them."""
    negative = {d - ndim if d >= 0 else d for d in dims}
    gone = 0 if keepdim else sum(d > slabs.dim for d in negative)
    return Slabs(slabs.dim + gone, slabs.bounds)


def _crosses(slabs: Slabs, ndim: int, dims: Sequence[int]) -> bool:
    return any((d - ndim if d >= 0 else d) == slabs.dim for d in dims)


def _dims(dim: Any, ndim: int) -> tuple[int, ...]:
    if dim is None or dim in ((), []):
        return tuple(range(-ndim, 0))
    return (dim,) if isinstance(dim, int) else tuple(dim)


@rule("mean", "sum")
def add_up(site: Site, input: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:  # noqa: A002
    """torch.sum and torch.mean."""
    slabs = site.slabs(input)
    dims = _dims(dim, input.ndim)
    if not _crosses(slabs, input.ndim, dims):
        return note(site.func(input, dims, keepdim, dtype=dtype), remaining(slabs, input.ndim, dims, keepdim))
    added = site.total(input.sum(dims, keepdim, dtype=dtype))
    if site.name == "sum":
        return added
    shape = full_shape(input)
    count = 1
    for d in dims:
        count *= shape[d]
    return added / count


@rule("softmax", "log_softmax", "softmin", "argmax", "argmin", "amax", "amin", "max", "min", "logsumexp", "cumsum",
      "normalize", "any", "all", "prod", "std", "var", "median", "sort", "topk", "cosine_similarity")  # fmt: skip
def along_another(site: Site, *args: Any, **kwargs: Any) -> Any:
    """What works along one dim, which is not the divided one.

    Raises:
        CannotDivide: it is, or all of them are.
    """
    if site.name in ("max", "min") and len(args) > 1 and isinstance(args[1], torch.Tensor):
        (mine, named), slabs = alike(site, (args, kwargs))
        return note(site.func(*mine, **named), slabs)
    (input, *rest), _ = alike(site, args)  # noqa: A001
    slabs = site.slabs(args[0])
    place = {"normalize": 2, "cosine_similarity": 2, "topk": 2}.get(site.name, 1)
    dim = kwargs.get("dim", args[place] if len(args) > place else None)
    if not isinstance(dim, int) or isinstance(dim, bool) or _crosses(slabs, input.ndim, (dim,)):
        raise CannotDivide("it works along the divided dim")
    made = site.func(input, *rest, **kwargs)
    kept = tensors_in(made)[0].ndim == input.ndim
    for tensor in tensors_in(made):
        note(tensor, remaining(slabs, input.ndim, (dim,), kept))
    return made


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
      "soft_margin_loss", "gaussian_nll_loss", "poisson_nll_loss")  # fmt: skip
def elementwise_loss(site: Site, *args: Any, **kwargs: Any) -> Any:
    """A loss for each element, and their mean or sum over the full tensor."""
    bound = _bound(site, args, kwargs)
    reduction = bound.arguments.pop("reduction", "mean")
    values, slabs = alike(site, dict(bound.arguments))
    losses = note(site.func(**values, reduction="none"), slabs)
    if reduction == "none":
        return losses
    added = site.total(losses.sum())
    return added / full_shape(losses).numel() if reduction == "mean" else added


@rule("cross_entropy", "nll_loss")
def class_loss(site: Site, *args: Any, **kwargs: Any) -> Any:
    """torch.nn.functional.cross_entropy and nll_loss of a score for each class, with dim 1, at each place.

    Weighted means are by the weights of the full tensor's targets, as torch has it.
    """
    bound = _bound(site, args, kwargs)
    given = dict(bound.arguments)
    reduction, weight = given.pop("reduction", "mean"), given.pop("weight", None)
    ignored = given.get("ignore_index", -100)
    places = given["input"].ndim - 2
    site.slabs(given["input"], places)
    values, slabs = alike(site, given)
    if reduction == "none":
        return note(site.func(**values, weight=weight, reduction="none"), slabs)
    added = site.func(**values, weight=weight, reduction="sum")
    if reduction == "sum":
        return site.total(added)
    target = values["target"]
    if target.is_floating_point():
        return site.total(added) / (full_shape(given["input"]).numel() / given["input"].shape[1])
    counted = target[target != ignored]
    divisor = counted.new_tensor(counted.numel()) if weight is None else weight[counted].sum()
    both = site.total(torch.stack([added, divisor.to(added)]))
    return both[0] / both[1]


def _bound(site: Site, args: Any, kwargs: Any) -> inspect.BoundArguments:
    function: Any = getattr(F, site.name)
    bound = inspect.signature(function).bind(*args, **kwargs)
    for name in ("size_average", "reduce"):
        if bound.arguments.pop(name, None) is not None:
            raise CannotDivide(f"the old argument {name}")
    return bound
