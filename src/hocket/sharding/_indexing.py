"""Rules of operators that take a tensor apart and put it together: pieces, indices, slices, joins, halves."""

import itertools
from typing import Any

import torch

from ._call import Operand, OperatorCall, Outcome
from ._placement import CannotShard, Interval, Shard
from ._table import rule


def _sliced(call: OperatorCall, shard: Shard, begin: int, end: int) -> tuple[Shard, Interval]:
    """Return how a slice of the divided dim is divided, and what slice this rank takes of its own shard.

    Raises:
        CannotShard: ranks own equal shares, and the slice does not begin and end where segments do.
    """
    if call.exchanges:
        end = max(begin, end)
        (bounds,) = shard.bounds
        mine, after = bounds[call.rank], bounds[call.rank + 1]
        own = min(max(begin, mine), after) - mine, min(max(end, mine), after) - mine
        return Shard(shard.dim, (tuple(min(max(bound, begin), end) - begin for bound in bounds),)), own
    ends = [sum(shard.segments[:i]) for i in range(len(shard.segments) + 1)]
    if begin not in ends or end not in ends or begin >= end:
        bounds = tuple(sorted({*ends, begin, end}))
        wanted = tuple(b - a for a, b in itertools.pairwise(bounds))
        call.refuse(f"takes {begin}:{end} out of the dim that is divided", [wanted])
    kept = Shard(shard.dim, shard.bounds[ends.index(begin) : ends.index(end)])
    return kept, (begin // call.ranks, end // call.ranks)


@rule("split", "chunk", "split_with_sizes", "tensor_split")
def pieces(call: OperatorCall, input: Any, amount: Any = None, dim: int = 0, **named: Any) -> Outcome:
    """Return how pieces lie; along the divided dim, every piece is divided by itself."""
    shard, dim = call.shard(input), dim % input.ndim
    amount = next(iter(named.values()), amount)
    if isinstance(amount, Operand) or len(named) > 1:
        call.refuse("is given something else than sizes")
    function: Any = getattr(torch, call.name)
    ends = [0]
    for piece in function(torch.empty(input.shape[dim], device="meta"), amount):
        ends.append(ends[-1] + len(piece))
    sizes = [b - a for a, b in itertools.pairwise(ends)]
    if dim != shard.dim:
        return [shard] * len(sizes)
    try:
        found = [_sliced(call, shard, a, b) for a, b in itertools.pairwise(ends)]
    except CannotShard as error:
        raise CannotShard(
            f"{call.name} takes pieces of {sizes} out of the dim that is divided", [tuple(sizes)]
        ) from error
    if call.name != "chunk" or len(set(sizes)) > 1 or call.exchanges:
        call.changed = True
        own = [b - a for _, (a, b) in found]
        if call.name == "tensor_split":  # whose pieces may be written to, as those of split may not
            call.becomes(input, list(itertools.accumulate(own))[:-1], dim)
        else:
            call.func = torch.split
            call.becomes(input, own, dim)
    return [one for one, _ in found]


@rule("narrow")
def narrow(call: OperatorCall, input: Any, dim: int, start: int, length: int) -> Outcome:
    """Return how an interval of one dim lies."""
    shard = call.shard(input)
    if dim % input.ndim != shard.dim:
        return shard
    if not isinstance(start, int):
        call.refuse("is given a tensor for a place")
    start %= max(shard.size, 1)
    found, (begin, end) = _sliced(call, shard, start, start + length)
    call.becomes(input, dim, begin, end - begin)
    return found


@rule("unbind", "select")
def without_dim(call: OperatorCall, input: Any, dim: int = 0, index: int = 0) -> Outcome:
    """Return how tensors lie of which one dim vanished."""
    shard, dim = call.shard(input), dim % input.ndim
    if dim == shard.dim:
        call.refuse("takes single elements of the dim that is divided")
    made = shard.at(shard.dim - (dim < shard.dim))
    return [made] * input.shape[dim] if call.name == "unbind" else made


@rule("index_select")
def index_select(call: OperatorCall, input: Any, dim: int, index: Any) -> Outcome:
    """Return how chosen entries of another dim than the divided one lie."""
    shard = call.shard(input)
    if dim % input.ndim == shard.dim or index.shard is not None:
        call.refuse("takes single elements of the dim that is divided")
    return shard


@rule("gather", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill")
def at_indices(call: OperatorCall, input: Any, dim: int, index: Any, *args: Any, **kwargs: Any) -> Outcome:
    """Return how results lie that are taken from, or put to, indices of another dim than the divided one."""
    row = call.name.startswith("index_")  # one row of indices for all other dims
    shard: Shard = next(one.shard for one in call.operands() if one.shard is not None)
    if not input.ndim or dim % input.ndim == shard.dim or (row and index.shard is not None):
        call.refuse("takes single elements of the dim that is divided")

    def mine(one: Any) -> Any:
        return call.share(one, shard) if isinstance(one, Operand) and one.ndim == input.ndim else one

    call.args = (mine(input), dim, index if row else mine(index), *map(mine, args))
    call.kwargs = {name: mine(one) for name, one in kwargs.items()}
    return shard


@rule("cat", "stack")
def joined(call: OperatorCall, tensors: Any, dim: int = 0) -> Outcome:
    """Return how tensors side by side lie; along the divided dim their segments follow each other."""
    if not isinstance(tensors, list | tuple):
        call.refuse("joins the entries of a tensor")
    stacked = call.name == "stack"
    first = next((one for one in tensors if one.shard is not None), None)
    shard = call.shard(first)
    assert first is not None
    dim %= first.ndim + stacked
    along = not stacked and dim == shard.dim
    nothing = [one for one in tensors if one.shape == (0,) and first.ndim > 1]  # which torch joins to anything
    if any(one.ndim != first.ndim for one in tensors if one not in nothing):
        call.refuse("joins tensors of different numbers of dims")
    mine: list[Any] = []
    segments: list[tuple[int, ...]] = []
    for one in tensors:
        if one in nothing:
            mine.append(one)
            continue
        if not along:
            mine.append(call.share(one, shard))
        elif one.shard is None:
            mine.append(call.share(one, Shard.even(dim, one.shape[dim], call.ranks)))
        elif one.shard.dim != dim:
            call.refuse("meets tensors that are divided differently")
        else:
            mine.append(one)
        segments += (one.shard or Shard.even(dim, one.shape[dim], call.ranks)).bounds if along else ()
    if along and call.exchanges:
        call.refuse("joins tensors along the divided dim")
    if call.changed:
        call.becomes(mine, dim)
    if along:
        return Shard(dim, tuple(segments))
    return shard.at(shard.dim + (stacked and dim <= shard.dim))


@rule("getitem")
def getitem(call: OperatorCall, input: Any, index: Any) -> Outcome:
    """Return how what is chosen lies: of the divided dim by slices, of others by numbers, None, ..., or one tensor."""
    shard = call.shard(input)
    given: list[Any] = list(index) if isinstance(index, tuple) else [index]
    chosen = [one for one in given if isinstance(one, Operand)]
    if len(chosen) > 1 or any(one.shard is not None for one in chosen):
        call.refuse("is given several tensors of indices, or one that is divided")
    plain = [one for one in given if not isinstance(one, Operand)]
    if not all(one is None or one is Ellipsis or isinstance(one, int | slice) for one in plain):
        call.refuse("is given indices in a list")
    if any(isinstance(one, bool) for one in given) or (chosen and any(isinstance(one, int) for one in plain)):
        call.refuse("is given a truth value for an index, or numbers beside a tensor")

    def dims(one: Any) -> tuple[int, int]:
        """Return how many dims an index takes, and how many it makes."""
        if isinstance(one, Operand):
            return (one.ndim, 1) if one.dtype in (torch.bool, torch.uint8) else (1, one.ndim)
        return int(one is not None), int(not isinstance(one, int))

    used = sum(dims(one)[0] for one in given if one is not Ellipsis)
    if not any(one is Ellipsis for one in given):
        given.append(Ellipsis)
    at = next(i for i, one in enumerate(given) if one is Ellipsis)
    given[at : at + 1] = [slice(None)] * (input.ndim - used)
    place = made = taken = 0
    while taken + dims(given[place])[0] <= shard.dim:
        taken, made, place = taken + dims(given[place])[0], made + dims(given[place])[1], place + 1
    entry = given[place]
    if not isinstance(entry, slice):
        call.refuse("takes single elements of the dim that is divided")
    if entry != slice(None):
        begin, end, step = entry.indices(shard.size)
        if step > 1 and begin < step and end == shard.size and not call.exchanges:
            if any(bound % step for one in shard.bounds for bound in one):
                call.refuse("takes slices with steps of the dim that is divided")
            return shard.at(made).scaled(1, step)
        if step != 1:
            call.refuse("takes slices with steps of the dim that is divided")
        shard, own = _sliced(call, shard, begin, end)
        given[place] = slice(*own)
        call.becomes(input, tuple(given))
    return shard.at(made)


@rule("slice")
def take_slice(
    call: OperatorCall, input: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Outcome:
    """Return how a slice lies, as ATen calls for it."""
    shard = call.shard(input)
    if dim % input.ndim == shard.dim and slice(start, end, step).indices(shard.size) != (0, shard.size, 1):
        call.refuse("takes slices of the dim that is divided")
    return shard


@rule("flip", "roll")
def turn(call: OperatorCall, input: Any, *args: Any, **kwargs: Any) -> Outcome:
    """Return how a tensor lies whose entries changed places along other dims than the divided one."""
    shard = call.shard(input)
    if call.name == "roll":
        args = args[1:]
    dims = kwargs.get("dims", args[0] if len(args) == 1 else args)
    if dims in ((), []) or any(d % input.ndim == shard.dim for d in ((dims,) if isinstance(dims, int) else dims)):
        call.refuse("works along the dim that is divided")
    return shard


@rule("tril", "triu")
def triangle(call: OperatorCall, input: Any, diagonal: int = 0) -> Outcome:
    """Return how triangles of matrices lie, which are the last two dims."""
    shard = call.shard(input)
    if shard.dim >= input.ndim - 2:
        call.refuse("works along the dim that is divided")
    return shard


@rule("glu")
def glu(call: OperatorCall, input: Any, dim: int = -1) -> Outcome:
    """Return how gated halves lie: along the divided dim, both halves must be divided alike."""
    shard = call.shard(input)
    if dim % input.ndim != shard.dim:
        return shard
    middle = len(shard.bounds) // 2
    if len(shard.bounds) % 2 or shard.bounds[:middle] != shard.bounds[middle:]:
        call.refuse("takes halves of the dim that is divided", [(shard.size // 2,) * 2])
    return Shard(shard.dim, shard.bounds[:middle])
