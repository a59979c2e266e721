"""Runs a tensor program on shards while its code speaks of full tensors.

Where a forward says `q.view(B, T, self.n_head, C // self.n_head)`, this rank has some of the heads only. A divided
tensor is a `ShardedTensor`: it knows how it is divided, torch asks it how a function is to be called, and it answers
by the rule of the operator. Shapes are told as those of the full tensor. What has no rule is called on gathered
tensors, or refused. So whatever way a program takes, a shard is never taken for the whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import torch_adapter
from ._call import NO_ANSWER, FetchedRows, Local, LocalShard, Operand, OperatorCall, ShardPeers, placements_of
from ._decompose import apply_rule
from ._operators import changes_first, operator_name
from ._placement import PARTIAL, CannotShard, Shard, cut, full_shape
from ._sharded_tensor import (
    GatheredSource,
    GatheredView,
    ShardedTensor,
    ShardingError,
    engine,
    gathered,
    mark_views,
    memory_of,
    note,
    noted,
    refusal,
    writes_to,
)
from ._table import RULES
from ._trees import leaves, mapped


@dataclass(frozen=True, slots=True)
class _Place:
    """In a plan, the place of a tensor."""

    number: int  # among the tensors that are given
    enters: bool  # whether it is a replicated one to which a gradient flows
    shard: Shard | None  # what of it is wanted; None for all


class _Plan(NamedTuple):
    """What is done with all calls of a function whose arguments are divided and shaped alike."""

    func: Any  # the function
    # this rank's, with operands and shards of such in the places of tensors; None to take them as given
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None
    shards: list[Shard | None]  # how each of the results is divided
    random: bool  # whether random numbers are this rank's own
    nested: bool = False  # whether some of these places are in lists, or named
    shares: Any = None  # see `_shares`


_plans: dict[Any, _Plan | torch.Size | int] = {}
_MOST_PLANS = 16384
_WITHOUT_GRADIENTS = "torch.distributed.fsdp."
"""Of modules whose hooks on gradients look at none: FSDP2 gathers the parameters of a block when one arrives."""
_PLAIN = frozenset([int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format])
_MAGIC = frozenset(["__get__", "__set__"])


def call_on_shards(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Make a call with divided tensors as if with the full ones; the thread's functions are called as they are."""
    if isinstance(func, torch._ops.OpOverload) and not torch.is_grad_enabled() and torch_adapter.in_backward():
        return func(*args, **kwargs)  # by a dispatch mode of the program's, from below autograd, which means shards
    if any(isinstance(leaf, torch.Tensor) for leaf in leaves(kwargs.get("out"))):
        return _written(func, args, dict(kwargs))
    tensors: list[Any] = []
    key: list[Any] = [getattr(func, "__self__", func) if getattr(func, "__name__", "") in _MAGIC else func]
    known = _describe(args, key, tensors) and (not kwargs or _describe(kwargs, key, tensors))
    first = next((one for one in tensors if type(one) is ShardedTensor), None) if known else None
    if first is None or any(type(one) is ShardedTensor and one._hocket_weight for one in tensors):
        return _examined(func, args, kwargs, None)
    peers = first.__dict__["_hocket_peers"]
    key.append(peers)
    plan = _plans.get(marks := tuple(key))
    if plan is None:
        return _examined(func, args, kwargs, marks)
    if type(plan) is not _Plan:
        return plan
    if plan.arguments is not None:

        def own(leaf: Any) -> Any:
            if type(leaf) is _Place:
                tensor = tensors[leaf.number]
                tensor = peers.enter(tensor) if leaf.enters else tensor
                return tensor if leaf.shard is None else cut(tensor, leaf.shard, peers.rank)
            return leaf

        args, kwargs = plan.arguments
        if plan.nested:
            args, kwargs = mapped(own, plan.arguments)
        else:
            args = [own(one) for one in args]
    if plan.random:
        with peers.own_random_numbers(first.device):
            result = plan.func(*args, **kwargs)
    else:
        result = plan.func(*args, **kwargs)
    if plan.shares is not None:
        result = _copied_as_whole(first, result, plan.shards[0], plan.shares)
    return _noted(result, plan.shards, peers)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Make a call that writes to tensors which it is given, divided or not."""
    out = kwargs.pop("out")
    made = call_on_shards(func, args, kwargs)
    for target, value in zip(leaves(out), leaves(made), strict=True):
        if target.numel() == 0 and type(target) is torch.Tensor:
            target.resize_(full_shape(value.shape, noted(value)))
        if full_shape(target.shape, noted(target)) != full_shape(value.shape, noted(value)):
            raise refusal(operator_name(func), target, "is given a tensor of another shape to write to")
        if not torch.can_cast(value.dtype, target.dtype):
            raise refusal(operator_name(func), target, f"is given a tensor of {target.dtype} to write {value.dtype} to")
        call_on_shards(torch.Tensor.copy_, (target, value), {})
    return out if isinstance(out, torch.Tensor) else type(made)(out)


def _describe(tree: Any, key: list[Any], tensors: list[Any]) -> bool:
    """Write into `key` all on which the plan of a call depends; return whether it can be written."""
    for leaf in tree.values() if type(tree) is dict else tree:
        kind = type(leaf)
        if kind in _PLAIN:
            key.append(kind)
            key.append(leaf)
        elif kind is ShardedTensor:
            tensors.append(leaf)
            key.append((leaf.__dict__["_hocket_shard"], leaf.shape, leaf.requires_grad, leaf.dtype))
        elif kind is torch.Tensor or kind is torch.nn.Parameter:
            tensors.append(leaf)
            key.append((leaf.shape, leaf.requires_grad, leaf.dtype))
        elif kind is tuple or kind is list or kind is torch.Size:
            key.append((kind, len(leaf)))
            if not _describe(leaf, key, tensors):
                return False
        elif kind is slice:
            edges = leaf.start, leaf.stop, leaf.step
            if any(type(edge) not in (int, type(None)) for edge in edges):
                return False
            key.append(edges)
        elif leaf is Ellipsis:
            key.append(leaf)
        else:
            return False
    if type(tree) is dict:
        key.extend(tree)
    return True


def _noted(result: Any, shards: list[Shard | None], peers: ShardPeers) -> Any:
    if type(result) is torch.Tensor and len(shards) == 1:
        return result if shards[0] is None else note(result, shards[0], peers)
    made = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
    for tensor, shard in zip(made, shards, strict=True):
        note(tensor, shard, peers)
    return result


def _examined(func: Any, args: Any, kwargs: dict[str, Any], marks: Any) -> Any:
    """Make a call whose plan is not known; what it writes to gathered views reaches the tensors they are views of."""
    given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    views = [leaf for leaf in given if type(leaf) is GatheredView]
    for view in views:
        view._hocket_source.refresh(operator_name(func))
    first = list(leaves(args[:1])) if views and changes_first(func, kwargs) else []
    sources = [(view._hocket_source, writes_to(view), any(one is view for one in first)) for view in views]
    for source, _, written in sources:
        if written:
            source.check(operator_name(func), several=args[0] is not first[0])
    result = _ruled(func, args, kwargs, given, marks)
    for source, version, written in sources:
        if written or writes_to(source.whole) != version:
            source.write()
        mark_views(result, source)
    return result


def _ruled(func: Any, args: Any, kwargs: dict[str, Any], given: list[Any], marks: Any) -> Any:
    """Make a call by its rule; remember what was done under `marks`, where that may be done again."""
    divided = [leaf for leaf in given if type(leaf) is ShardedTensor]
    if not divided:
        return func(*args, **kwargs)
    name, peers = operator_name(func), divided[0]._hocket_peers
    if name.startswith("get_") and name not in RULES:
        asked = func(*args, **kwargs)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves(asked)):
            return asked
    if name == "get_grad" and args[0].grad is not None:
        return note(args[0].grad, args[0]._hocket_shard, peers)
    if name in ("backward", "grad"):
        return _back_propagated(func, args, kwargs, divided)
    if name in _OF_MEMORY:
        hook = name == "register_hook"
        if hook and str(getattr(args[-1], "__module__", "")).startswith(_WITHOUT_GRADIENTS):
            return func(*args, **kwargs)
        if torch_adapter.compiling():
            raise ShardingError(
                "torch.compile cannot read tensors of which every rank has a part: call the model uncompiled, or take "
                "a plan of data parallelism"
            )
        raise refusal(name, divided[0], "would see a part's gradient" if hook else "asks how the tensor lies in memory")
    operands = mapped(as_operand, tuple(args)), mapped(as_operand, kwargs)
    call = OperatorCall(name, *operands, peers.size, peers.rank, peers.exchanges, func, changes_first(func, kwargs))
    weight, alone = call.weight, call.alone_weight  # as the program calls it: a rule changes the call
    told = [id(one.tensor) for one in call.operands()]
    numbers = {one: i for i, one in reversed(list(enumerate(told)))}
    try:
        outcome = apply_rule(call)
    except CannotShard as error:
        if not peers.gathers:
            raise
        tell(peers, name, args, kwargs, error.reason)
        call.func = func  # a rule may have put another in its place before it was refused
        return _on_gathered(call, args, kwargs, error)
    tell(peers, name, args, kwargs, call.gathered)
    if call.answer is not NO_ANSWER:
        if marks is not None and type(call.answer) in (int, torch.Size):
            _remember(marks, call.answer)
        return call.answer
    with peers.own_random_numbers(divided[0].device) if call.random else nullcontext():
        result = Local(peers, call.func).result(call, outcome)
    made = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
    shards = placements_of(outcome, len(made))
    shares = _shares(name, kwargs)
    if shares is not None:
        made = [result := _copied_as_whole(divided[0], result, shards[0], shares)]
    if marks is not None and call.run is None and outcome is not PARTIAL and peers.heard is None:
        # A tensor in two places would stand for two in the next call.
        plan = _plan(call, shards, numbers, repeated=len(numbers) < len(told))
        if plan is not None:
            _remember(marks, plan)
    for tensor, shard in zip(made, shards, strict=True):
        note(tensor, shard, peers, weight)
    # A call that changes its first argument returns that very tensor: further writes to a copy of it would be lost.
    return mapped(gathered, result) if alone and not weight and not call.in_place else result


def _plan(call: OperatorCall, shards: list[Shard | None], numbers: dict[int, int], repeated: bool) -> _Plan | None:
    if any(isinstance(leaf, FetchedRows) for leaf in leaves((call.args, call.kwargs))):
        return None
    entering = any(one.shard is None and one.grad for one in call.operands())
    shares = _shares(call.name, call.kwargs)
    if not (call.changed or entering):
        return _Plan(call.func, None, shards, call.random, shares=shares)
    if repeated:
        return None

    def place(leaf: Any) -> Any:
        operand = leaf.operand if isinstance(leaf, LocalShard) else leaf
        if not isinstance(operand, Operand):
            return leaf
        cut_as = leaf.shard if isinstance(leaf, LocalShard) else None
        enters = cut_as is not None or (operand.shard is None and operand.grad)
        return _Place(numbers[id(operand.tensor)], enters, cut_as)

    args, kwargs = mapped(place, (call.args, call.kwargs))
    inner = (leaf for one in (*args, kwargs) if not isinstance(one, _Place) for leaf in leaves(one))
    nested = any(isinstance(leaf, _Place) for leaf in inner)
    return _Plan(call.func, (args, kwargs), shards, call.random, nested, shares)


def _remember(marks: Any, plan: Any) -> None:
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[marks] = plan


def _back_propagated(func: Any, args: Any, kwargs: dict[str, Any], divided: list[Any]) -> Any:
    """Have autograd begin at divided tensors, whose gradients are divided alike, or end there.

    The pass itself asks about shards again: checkpointed code runs in it, and so do hooks.
    """
    named = dict(zip(_GRAD if func is torch.autograd.grad else _BACKWARD, args, strict=False)) | kwargs
    roots = _listed(named.get("outputs", named.get("tensors")))
    given: list[Any] = []
    for word in ("gradients", "gradient", "grad_outputs", "grad_tensors"):
        given = given or _listed(named.get(word))
    if any(noted(root) != noted(one) for root, one in zip(roots, given or [None] * len(roots), strict=False)):
        raise refusal(func.__name__, divided[0], "begins with a gradient that is divided in another way")
    ends = _listed(named.get("inputs"))
    inputs = {id(one) for one in ends}

    def unasked(leaf: Any) -> Any:
        if type(leaf) is not ShardedTensor:
            return leaf
        return torch.autograd.graph.get_gradient_edge(leaf) if id(leaf) in inputs else torch.ops.aten.alias(leaf)

    args, kwargs = mapped(unasked, (args, kwargs))
    with torch._C._EnableTorchFunction():
        found = func(*args, **kwargs)
    for gradient, of in zip(found or (), ends, strict=False):
        if type(of) is ShardedTensor and gradient is not None:
            note(gradient, of._hocket_shard, of._hocket_peers)
    return found


_GRAD, _BACKWARD = ("outputs", "inputs", "grad_outputs"), ("tensors", "gradients")


def _listed(value: Any) -> list[Any]:
    return [] if value is None else [value] if isinstance(value, torch.Tensor) else list(value)


def as_operand(leaf: Any) -> Any:
    """Return what a rule is told of a tensor; other values as they are."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shard = noted(leaf)
    weight = "" if shard is None else leaf.__dict__["_hocket_weight"]
    return Operand(full_shape(leaf.shape, shard), shard, leaf.requires_grad, False, leaf.dtype, leaf, weight)


def tell(peers: ShardPeers, name: str, args: Any, kwargs: Any, why: str) -> None:
    """Tell who listens of a call, and why it was made on gathered tensors; "" if it was not."""
    if peers.heard is not None:
        peers.heard(name, (args, kwargs), "gathered" if why else "divided", why)


def _on_gathered(call: OperatorCall, args: Any, kwargs: dict[str, Any], error: CannotShard) -> Any:
    """Make a call on the full tensors, on every rank; of what is written to divided ones each keeps its shard."""
    fulls: dict[int, tuple[GatheredSource, int]] = {}

    def full(leaf: Any) -> Any:
        if type(leaf) is not ShardedTensor:
            return leaf
        if id(leaf) not in fulls:
            whole = gathered(leaf)
            fulls[id(leaf)] = GatheredSource(leaf, whole, writes_to(leaf)), writes_to(whole)
        return fulls[id(leaf)][0].whole

    target = next(iter((*args, *kwargs.values()))) if call.in_place else None
    if isinstance(target, tuple | list):
        raise refusal(call.name, next(iter(target)), f"writes to several tensors, and {error.reason}") from error
    full_args, full_kwargs = mapped(full, (args, kwargs))
    result = call.func(*full_args, **full_kwargs)
    for source, version in fulls.values():
        part, whole = source.part, source.whole
        if whole.shape != full_shape(part.shape, part._hocket_shard):
            raise refusal(call.name, part, f"changes the shape, and {error.reason}") from error
        # An operator of a library, or a table of vectors that is scaled as it is read; batch norm counts no writes.
        statistics = "batch_norm" in call.name and part.ndim == 1
        changed = writes_to(whole) != version or (statistics and not torch.equal(whole, gathered(part)))
        if changed or target is part:
            source.write()
        if _shares(call.name, call.kwargs) is not None:
            source.held = weakref.ref(part) if part._base is None else lambda: True
            source.part, source.whole = part.detach(), whole.detach()
        mark_views(result, source)
    tensors = {id(source.whole): source.part for source, _ in fulls.values() if source.held is None}
    found = any(id(leaf) in tensors for leaf in leaves(result))
    return mapped(lambda leaf: tensors.get(id(leaf), leaf), result) if found else result


def _shares(name: str, kwargs: dict[str, Any]) -> Callable[[torch.Tensor, list[int]], bool] | None:
    """Return what tells whether a call gives a view of a tensor, or a copy, by how the tensor lies; None of others."""
    if name == "contiguous":
        return lambda whole, shape: whole.is_contiguous(**kwargs)
    if name in ("reshape", "reshape_as", "flatten"):
        return lambda whole, shape: whole.reshape(shape).untyped_storage()._cdata == whole.untyped_storage()._cdata
    return None


def _copied_as_whole(source: Any, result: torch.Tensor, shard: Shard | None, shares: Any) -> torch.Tensor:
    """Return a copy of a result that shares a divided tensor's memory where that of the full one would not.

    A shard of one row is contiguous, and a view where the full tensor is copied: later writes to the result would reach
    it. Where a shard has more rows, both are alike.
    """
    dim, size = source._hocket_shard.dim, source._hocket_shard.size
    if source.shape[dim] != 1 or size == 1 or shard is None or memory_of(result) != memory_of(source):
        return result
    # The rows of other ranks lie between this one's and what is as far apart, or further.
    strides = [one * size if one >= source.stride(dim) else one for one in source.stride()]
    strides[dim] = source.stride(dim)
    whole = torch.empty_strided(full_shape(source.shape, source._hocket_shard), strides, device="meta")
    return result if shares(whole, full_shape(result.shape, shard)) else result.clone()


_OF_MEMORY = frozenset(
    ["as_strided", "as_strided_copy", "as_strided_scatter", "stride", "storage_offset", "data_ptr", "storage", "set"]
    + ["resize", "resize_as", "set_data", "register_hook"]
)


engine.append(call_on_shards)  # which the tensors' module cannot import
