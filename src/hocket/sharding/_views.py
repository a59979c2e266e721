"""Rules of operators that give a tensor another shape or order: views, permutations, repeated dims."""

import math
from typing import Any

import torch

from ._call import OperatorCall, Outcome
from ._placement import reshaped
from ._table import rule


def _sizes(call: OperatorCall, given: Any, kwargs: dict[str, Any]) -> list[int]:
    """Return the sizes that a program gives one by one, in a sequence, or by name."""
    if not given:
        given = (kwargs.pop("shape", kwargs.pop("size", kwargs.pop("dims", kwargs.pop("repeats", ())))),)
    sizes = list(given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given)
    if kwargs or not sizes or not all(isinstance(one, int) for one in sizes):
        call.refuse("is given something else than sizes")
    return sizes


def _resolved(sizes: list[int], count: int) -> tuple[int, ...]:
    known = math.prod(one for one in sizes if one != -1)
    return tuple(count // max(known, 1) if one == -1 else one for one in sizes)


@rule("view", "reshape")
def view(call: OperatorCall, input: Any, *shape: Any, **kwargs: Any) -> Outcome:
    """Return how a view lies; sizes are those of the full tensor."""
    sizes = _sizes(call, shape, kwargs)
    full = _resolved(sizes, math.prod(input.shape))
    shard = reshaped(call.shard(input), input.shape, full)
    if call.exchanges:  # a shard may be empty, or lie in a larger tensor, so that neither -1 nor a view would do
        local = [*full[: shard.dim], call.mine(shard), *full[shard.dim + 1 :]]
        call.run = lambda local_call: local_call.tensors(input).reshape(local)
    elif sizes[shard.dim] != -1:
        sizes[shard.dim] = call.mine(shard)
        call.becomes(input, sizes)
    return shard


@rule("view_as", "reshape_as")
def view_as(call: OperatorCall, input: Any, other: Any) -> Outcome:
    """Return how a view lies; sizes are those of another full tensor."""
    shard = view(call, input, *other.shape)
    call.func = torch.Tensor.view if call.name == "view_as" else torch.Tensor.reshape
    return shard


@rule("view_as_complex", "view_as_real")
def as_complex(call: OperatorCall, input: Any) -> Outcome:
    """Return how complex numbers lie that were pairs in the last dim, or the other way round."""
    if call.name == "view_as_complex" and call.shard(input).dim == input.ndim - 1:
        call.refuse("makes numbers of pairs along the dim that is divided")
    return call.shard(input)


@rule("flatten")
def flatten(call: OperatorCall, input: Any, start_dim: int = 0, end_dim: int = -1) -> Outcome:
    """Return how a tensor lies of which several dims became one."""
    start, end = start_dim % max(input.ndim, 1), end_dim % max(input.ndim, 1)
    full = (*input.shape[:start], math.prod(input.shape[start : end + 1]), *input.shape[end + 1 :])
    return view(call, input, full) if call.exchanges else reshaped(call.shard(input), input.shape, full)


@rule("unflatten")
def unflatten(call: OperatorCall, input: Any, dim: int, sizes: Any) -> Outcome:
    """Return how a tensor lies of which one dim became several."""
    dim %= input.ndim
    middle = _resolved(list(sizes), input.shape[dim])
    full = (*input.shape[:dim], *middle, *input.shape[dim + 1 :])
    if call.exchanges:
        return view(call, input, full)
    shard = reshaped(call.shard(input), input.shape, full)
    at = shard.dim - dim
    if 0 <= at < len(middle) and sizes[at] != -1:
        call.becomes(input, dim, (*middle[:at], call.mine(shard), *middle[at + 1 :]))
    return shard


@rule("squeeze")
def squeeze(call: OperatorCall, input: Any, dim: Any = None) -> Outcome:
    """Return how a tensor lies without dims of one element."""
    shard, rank = call.shard(input), input.ndim
    chosen = set(range(rank)) if dim is None else {d % rank for d in ((dim,) if isinstance(dim, int) else dim)}
    if shard.dim in chosen and (shard.size == 1 or any(shard.length(r) == 1 for r in range(call.ranks))):
        call.refuse("would take a rank's only element for a dim of size one")
    return shard.at(shard.dim - sum(input.shape[d] == 1 for d in chosen if d < shard.dim))


@rule("unsqueeze")
def unsqueeze(call: OperatorCall, input: Any, dim: int) -> Outcome:
    """Return how a tensor lies with a dim of one element more."""
    shard = call.shard(input)
    return shard.at(shard.dim + (dim % (input.ndim + 1) <= shard.dim))


@rule("transpose", "t", "adjoint", "get_T", "get_mT", "get_H", "get_mH")
def transpose(call: OperatorCall, input: Any, dim0: int = -2, dim1: int = -1) -> Outcome:
    """Return how a tensor lies of which two dims changed places."""
    shard = call.shard(input)
    if input.ndim < 2:
        return shard
    if call.name == "get_T" and input.ndim != 2:
        call.refuse("of a tensor that is no matrix")
    a, b = dim0 % input.ndim, dim1 % input.ndim
    return shard.at({a: b, b: a}.get(shard.dim, shard.dim))


@rule("permute")
def permute(call: OperatorCall, input: Any, *dims: Any, **kwargs: Any) -> Outcome:
    """Return how a tensor lies whose dims changed places."""
    shard = call.shard(input)
    return shard.at([d % input.ndim for d in _sizes(call, dims, kwargs)].index(shard.dim))


@rule("movedim")
def movedim(call: OperatorCall, input: Any, source: Any, destination: Any) -> Outcome:
    """Return how a tensor lies of which some dims went elsewhere: torch's own arithmetic, on a mark."""
    shard = call.shard(input)
    mark = torch.empty([2 if d == shard.dim else 1 for d in range(input.ndim)], device="meta")
    return shard.at(list(mark.movedim(source, destination).shape).index(2))


@rule("expand")
def expand(call: OperatorCall, input: Any, *sizes: Any, **kwargs: Any) -> Outcome:
    """Return how a tensor lies of which dims of one element are repeated."""
    kwargs.pop("implicit", None)
    shard, new = call.shard(input), _sizes(call, sizes, kwargs)
    at = shard.dim + len(new) - input.ndim
    if new[at] not in (-1, shard.size):
        call.refuse("repeats along the dim that is divided")
    if new[at] != -1:
        new[at] = call.mine(shard)
        call.becomes(input, new)
    return shard.at(at)


@rule("repeat", "tile")
def repeat(call: OperatorCall, input: Any, *times: Any, **kwargs: Any) -> Outcome:
    """Return how a tensor lies that is repeated along other dims than the divided one."""
    shard, counts = call.shard(input), _sizes(call, times, kwargs)
    at = shard.dim + len(counts) - input.ndim
    if at >= 0 and counts[at] != 1:
        call.refuse("repeats along the dim that is divided")
    return shard.at(max(at, shard.dim) if call.name == "tile" else at)


@rule("repeat_interleave")
def repeat_interleave(call: OperatorCall, input: Any, repeats: Any, dim: int | None = None) -> Outcome:
    """Return how a tensor lies whose elements are repeated in their places: keys that several heads share."""
    shard = call.shard(input)
    if dim is None or not isinstance(repeats, int):
        call.refuse("along no dim, or by different numbers")
    return shard.scaled(repeats) if dim % input.ndim == shard.dim else shard
