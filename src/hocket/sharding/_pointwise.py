"""Rules of operators that work element by element, of dropout, and of what asks about a tensor."""

import math
from typing import Any

import torch

from ._call import Operand, OperatorCall, Outcome
from ._placement import REPLICATED, Shard
from ._table import rule
from ._trees import mapped


def aligned(call: OperatorCall, tree: Any) -> tuple[Any, Shard, int]:
    """Return arguments divided as the first divided one is, for operators that broadcast them against each other.

    An operand that has one entry along the divided dim, or lacks the dim, goes with every shard. Returned with how the
    broadcast result is divided, and how many dims it has.
    """
    operands = list(_operands(tree))
    ndim = max(one.ndim for one in operands)
    first = next((one for one in operands if one.shard is not None), None)
    if first is None or first.shard is None:
        call.refuse("uses shards in another place than its first argument")
    from_end, shard = first.ndim - first.shard.dim, first.shard
    if shard.size == 1 and any(o.ndim >= from_end and o.shape[-from_end] != 1 for o in operands):
        call.refuse("broadcasts along the dim that is divided")
    before = call.changed

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Operand):
            return leaf
        if leaf.shard is None and (leaf.ndim < from_end or leaf.shape[-from_end] == 1 != shard.size):
            return leaf
        dim = leaf.ndim - from_end
        if dim < 0 or (leaf.shard is not None and leaf.shard.dim != dim):
            call.refuse("meets tensors that are divided differently")
        return call.share(leaf, shard.at(dim))

    changed = mapped(change, tree)
    call.changed = call.changed or before
    return changed, shard.at(ndim - from_end), ndim


def _operands(tree: Any) -> list[Operand]:
    found: list[Operand] = []
    mapped(lambda leaf: found.append(leaf) if isinstance(leaf, Operand) else None, tree)
    return found


@rule("pointwise")
def pointwise(call: OperatorCall, *args: Any, **kwargs: Any) -> Outcome:
    """Return how results lie of which every element comes from those in the same place."""
    (call.args, call.kwargs), shard, _ = aligned(call, (args, kwargs))
    return shard


@rule("to", "type_as")
def converted(call: OperatorCall, input: Any, *args: Any, **kwargs: Any) -> Outcome:
    """Return how a tensor lies that is given a type, a device or another's: as it is, whatever the other is like."""
    if input.shard is not None:
        return input.shard  # type: ignore[no-any-return]
    call.run = lambda local: local.func(*local.given((input, *args)), **local.given(kwargs))
    return REPLICATED


@rule("where")
def where(call: OperatorCall, *args: Any, **kwargs: Any) -> Outcome:
    """Return how results of torch.where lie; with a condition alone it finds places, for which there is no rule."""
    if len(args) + len(kwargs) < 3:
        call.refuse("finds places in the full tensor")
    return pointwise(call, *args, **kwargs)


@rule("rand_like", "randn_like", "randint_like", "bernoulli", "rrelu", "dropout", "alpha_dropout")
def random(call: OperatorCall, input: Any, *args: Any, **kwargs: Any) -> Outcome:
    """Return how results lie of which every rank draws its own shard."""
    shard = call.shard(input)
    outcome = pointwise(call, input, *args, **kwargs)
    place = {"rrelu": 2}.get(call.name, 1)
    drawn = True
    if call.name in ("rrelu", "dropout", "alpha_dropout"):
        drawn = bool(kwargs.get("training", args[place] if len(args) > place else call.name != "rrelu"))
    if call.name in ("dropout", "alpha_dropout"):
        drawn = drawn and kwargs.get("p", args[0] if args else 0.5) > 0
    _draw(call, drawn, shard)
    return outcome


@rule("dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_alpha_dropout")
def dropout_of_channels(call: OperatorCall, input: Any, *args: Any, **kwargs: Any) -> Outcome:
    """Return how results lie of dropout of whole channels: ranks with shards of the same channels drop the same."""
    shard = call.shard(input)
    unbatched = (call.name, input.ndim) in (("dropout1d", 2), ("dropout3d", 4))
    if shard.dim < (1 if unbatched else 2):
        if not call.exchanges:
            call.refuse("drops whole channels, of which every rank has a share")
        _draw(call, True, shard)
    return pointwise(call, input, *args, **kwargs)


def _draw(call: OperatorCall, drawn: bool, shard: Shard) -> None:
    call.random = drawn
    call.changed = call.changed or drawn


@rule("prelu")
def prelu(call: OperatorCall, input: Any, weight: Any) -> Outcome:
    """Return how results of prelu lie, whose weight belongs to channels."""
    shard = call.shard(input)
    if shard.dim == 1 and weight.shape != (1,):
        call.becomes(input, call.share(weight, shard.at(0)) if weight.shape else weight)
    else:
        call.replicated(weight)
    return shard


@rule("array_wrap")
def array_wrap(call: OperatorCall, input: Any, *args: Any, **kwargs: Any) -> Outcome:
    """Return how a tensor lies that numpy has made of the full one: every rank has all of it."""
    call.run = lambda local: local.func(*local.given((input, *args)), **local.given(kwargs))
    return REPLICATED


@rule("deepcopy")
def deep_copy(call: OperatorCall, input: Any, memo: Any) -> Outcome:
    """Refuse to copy a shard, of which torch's own code asks what kind of tensor it is: the full one is copied."""
    call.refuse("copies the full tensor")


_ASKED = """
dim get_ndim get_dtype get_device get_requires_grad get_is_cuda get_is_cpu get_layout get_is_sparse get_is_nested
get_is_quantized get_is_meta get_itemsize get_grad_fn get_is_leaf get_grad get_is_mps get_name get_names get_output_nr
is_floating_point is_complex is_contiguous element_size data_ptr stride storage_offset is_signed requires_grad_
register_hook retain_grad hash repr format untyped_storage backward is_inference is_shared is_pinned
register_post_accumulate_grad_hook is_leaf
"""


@rule(*_ASKED.split())
def ask(call: OperatorCall, *args: Any, **kwargs: Any) -> Outcome:
    """Return how nothing lies: the call asks what is the same of a shard, or acts on this rank's own."""
    return REPLICATED


@rule("get_data")
def data(call: OperatorCall, input: Any) -> Outcome:
    """Return how the tensor's data lies."""
    return call.shard(input)


@rule("size", "get_shape", "shape", "numel", "len", "get_nbytes")
def size(call: OperatorCall, input: Any, dim: int | None = None) -> Outcome:
    """Answer with the full tensor's sizes: the program computes with them."""
    shard = call.shard(input)
    if dim is not None:
        call.answer = input.shape[dim]
        call.changed = dim % input.ndim == shard.dim
        return REPLICATED
    call.changed = True
    if call.name in ("numel", "get_nbytes"):
        call.answer = math.prod(input.shape) * (1 if call.name == "numel" else input.dtype.itemsize)
    else:
        call.answer = input.shape[0] if call.name == "len" else torch.Size(input.shape)
    return REPLICATED


@rule("is_same_size")
def is_same_size(call: OperatorCall, input: Any, other: Any) -> Outcome:
    """Answer with what the full tensors' sizes say."""
    call.answer, call.changed = input.shape == other.shape, True
    return REPLICATED
