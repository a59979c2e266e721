"""Operators without a rule of their own: by the simpler operators into which torch itself decomposes them.

The call is traced twice on the meta device, on full tensors and on this rank's shards. Rules are applied to each
operator of the first trace; the call may be made on shards as it is if the second trace does, operator by operator,
exactly what the rules demand of this rank.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ._call import NO_ANSWER, FetchedRows, LocalShard, Operand, OperatorCall, Outcome, placements_of
from ._operators import aten_name
from ._placement import PARTIAL, REPLICATED, CannotShard, Placement, Shard
from ._pointwise import aligned
from ._table import RULES, apply, rule_for
from ._trees import leaves, mapped

_POINTWISE = object()
_known: dict[Any, Any] = {}
_MOST_KNOWN = 4096


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the operators that have rules, decomposing those that have none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[tuple[str, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = aten_name(func)
        if rule_for(name) is None:
            from torch._decomp import decomposition_table

            if func in decomposition_table:
                with self:
                    return decomposition_table[func](*args, **(kwargs or {}))
        seen = mapped(_seen, (tuple(args), kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.steps.append((name, *seen, result))
        return result


def _seen(leaf: Any) -> Any:
    """Return an argument as it is now: a later step such as `unsqueeze_` may change a tensor's shape."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return Operand(tuple(leaf.shape), None, False, False, leaf.dtype, leaf)


def apply_rule(call: OperatorCall) -> Outcome:
    """Apply the rule of the operator that is called, or those of the operators into which it decomposes.

    Returns:
        How the results lie. The call's arguments are changed into those of this rank.

    Raises:
        CannotShard: the call cannot be made on shards; says why.
        NeedsShard: an operand should be divided where it is made.
    """
    found = rule_for(call.name)
    return decomposed(call) if found is None else apply(found, call)


def decomposed(call: OperatorCall) -> Outcome:
    """Return how the results of a call lie, by the operators into which it decomposes.

    CannotShard if it does not, or one of these cannot be applied to shards as it is.
    """
    if call.func is None or call.in_place:
        call.refuse("has no rule")
    key = _key(call)
    found = _known.get(key) if key is not None else None
    if found is None:
        try:
            found = _examined(call)
        except CannotShard as error:
            found = _broadcast(call) or error
        if key is not None:
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[key] = found
    if isinstance(found, CannotShard):
        raise found
    if isinstance(found, _Broadcast):
        (call.args, call.kwargs), _, _ = aligned(call, (call.args, call.kwargs))
        return found.outcome
    return apply(RULES["pointwise"], call) if found is _POINTWISE else found


def _key(call: OperatorCall) -> Any:
    def plain(leaf: Any) -> Any:
        return (leaf.shape, leaf.shard, leaf.dtype) if isinstance(leaf, Operand) else (type(leaf), leaf)

    key = (call.func, call.rank, call.exchanges, repr(mapped(plain, (call.args, call.kwargs))))
    return key if all(_by_value(leaf) for leaf in leaves((call.args, call.kwargs))) else None


def _by_value(leaf: Any) -> bool:
    kinds = (Operand, int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
    return isinstance(leaf, kinds)


def _traced(call: OperatorCall, local: bool) -> tuple[list[tuple[str, Any, Any, Any]], Any, dict[int, Shard]]:
    shards: dict[int, Shard] = {}
    made: dict[int, torch.Tensor] = {}

    def meta(leaf: Any) -> Any:
        if not isinstance(leaf, Operand):
            return leaf
        if id(leaf) not in made:
            shape = list(leaf.shape)
            if local and leaf.shard is not None:
                shape[leaf.shard.dim] = call.mine(leaf.shard)
            made[id(leaf)] = tensor = torch.empty(shape, dtype=leaf.dtype, device="meta")
            if leaf.shard is not None:
                shards[id(tensor)] = leaf.shard
        return made[id(leaf)]

    args, kwargs = mapped(meta, call.args), mapped(meta, call.kwargs)
    try:
        with torch.no_grad(), _Trace() as trace:
            result = call.func(*args, **kwargs)
    except Exception as error:  # whatever an operator that has no form for the meta device raises
        raise CannotShard(f"{call.name} has no rule") from error
    trace.steps.append(("", list(made.values()), {}, None))  # so that they live as long as their ids are in use
    return trace.steps, result, shards


def _examined(call: OperatorCall) -> Any:
    """Return what all ranks come to: they must agree on what is divided."""
    rank, found = call.rank, None
    try:
        for one in range(call.ranks if call.exchanges else 1):
            call.rank = one
            found = _examined_by(call)
    finally:
        call.rank = rank
    return found


def _examined_by(call: OperatorCall) -> Any:
    steps, result, shards = _traced(call, local=False)
    mine, my_result, _ = _traced(call, local=True)
    if _answers(result) != _answers(my_result):
        call.refuse("has no rule, and tells what differs on shards")
    given = steps.pop()[1]
    mine.pop()
    divided = set(shards)
    tensors = [leaf for step in steps[:1] for leaf in leaves(step[1:3]) if isinstance(leaf, Operand)]
    if len(steps) == 1 and len(tensors) == len(list(call.operands())) and _is_pointwise(steps[0][0]):
        return _POINTWISE
    if [step[0] for step in steps] != [step[0] for step in mine]:
        call.refuse("has no rule")
    for step, (name, my_args, my_kwargs, _) in zip(steps, mine, strict=True):
        if _demanded(call, *step, shards) != _marked((my_args, my_kwargs)):
            call.refuse(f"has no rule, nor is there one for its {name} on shards")
    made = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
    read = set(map(id, made))
    for *arguments, results in (step[1:] for step in reversed(steps)):
        if not read.isdisjoint(id(leaf) for leaf in leaves(results)):
            read |= {id(leaf.tensor) for leaf in leaves(arguments) if isinstance(leaf, Operand)}
    for one in given:  # one that the simpler operators leave out (beta=0), and whose size the operator looks at
        if id(one) not in read | divided and any(_has_divided_dim(one, leaf, shards.get(id(leaf))) for leaf in made):
            call.refuse("has no rule, and is given more than shards of what it does not read")
    return [shards.get(id(leaf), REPLICATED) for leaf in made] or REPLICATED


def _has_divided_dim(one: torch.Tensor, made: torch.Tensor, shard: Shard | None) -> bool:
    from_end = 0 if shard is None else made.dim() - shard.dim
    return shard is not None and one.dim() >= from_end and one.shape[-from_end] == shard.size != 1


class _Broadcast(NamedTuple):
    """How results lie once all operands are divided as if they were broadcast against each other."""

    outcome: Outcome


def _broadcast(call: OperatorCall) -> _Broadcast | None:
    def divided(leaf: Any) -> Any:
        return dataclasses.replace(leaf.operand, shard=leaf.shard) if isinstance(leaf, LocalShard) else leaf

    twin = dataclasses.replace(call)
    try:
        mine = aligned(twin, (call.args, call.kwargs))
        if not twin.changed or any(isinstance(leaf, FetchedRows) for leaf in leaves(mine[0])):
            return None
        twin.args, twin.kwargs = mapped(divided, mine[0])
        found = _examined(twin)
    except CannotShard:
        return None
    return None if found is _POINTWISE else _Broadcast(found)


def _answers(result: Any) -> list[Any]:
    return [leaf for leaf in leaves(result) if not isinstance(leaf, torch.Tensor)]


def _is_pointwise(name: str) -> bool:
    """Return whether a step of a trace works element by element."""
    return rule_for(name) is RULES["pointwise"]


def _demanded(call: OperatorCall, name: str, args: Any, kwargs: Any, made: Any, shards: dict[int, Shard]) -> Any:
    """Apply the rule of one operator of the trace; return its arguments as it demands them of this rank."""

    def operand(leaf: Any) -> Any:
        return dataclasses.replace(leaf, shard=shards.get(id(leaf.tensor))) if isinstance(leaf, Operand) else leaf

    inner = OperatorCall(name, mapped(operand, args), mapped(operand, kwargs), call.ranks, call.rank, call.exchanges)
    made = [leaf for leaf in leaves(made) if isinstance(leaf, torch.Tensor)]
    if all(one.shard is None for one in inner.operands()):
        return _marked((inner.args, inner.kwargs))
    found = rule_for(name)
    if found is None:
        call.refuse(f"has no rule, nor has its {name}")
    try:
        outcome = apply(found, inner)
    except CannotShard as error:
        raise CannotShard(f"{call.name}: {error.reason}", error.segments) from None
    partial = outcome is PARTIAL or (not isinstance(outcome, Placement) and PARTIAL in outcome)
    if inner.run is not None or inner.random or partial or inner.answer is not NO_ANSWER:
        call.refuse(f"has no rule, and its {name} needs other ranks")
    for leaf, shard in zip(made, placements_of(outcome, len(made)), strict=True):
        shards.pop(id(leaf), None)
        if shard is not None:
            shards[id(leaf)] = shard
    return _marked((inner.args, inner.kwargs))


def _marked(tree: Any) -> list[Any]:
    """Return the arguments with a mark in the place of each tensor; a shard of a replicated one has another mark."""

    def mark(leaf: Any) -> Any:
        if isinstance(leaf, Operand | torch.Tensor):
            return "tensor"
        return leaf if _by_value(leaf) else repr(leaf)

    return list(leaves(mapped(mark, tree)))
