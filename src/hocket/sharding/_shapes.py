"""Rules of operators that rearrange elements: views, permutations, joins, pieces, indices, padding."""

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F

from ._call import Operand, OperatorCall, Outcome
from ._placement import CannotShard, Interval, Shard, cut, reshaped
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


@rule("pad")
def pad(call: OperatorCall, input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Outcome:
    """Return how a padded tensor lies; padding of the divided dim by other than constants needs all of the tensor."""
    shard, sides = call.shard(input), list(pad)
    at = 2 * (input.ndim - 1 - shard.dim)
    if not call.exchanges and (at >= len(sides) or sides[at : at + 2] == [0, 0]):
        return shard
    call.exchange("pads the dim that is divided")
    low, high = (sides[at], sides[at + 1]) if at < len(sides) else (0, 0)
    (bounds,) = shard.bounds
    moved = (0, *(bound + low for bound in bounds[1:-1]), shard.size + low + high)
    outputs = Shard(shard.dim, (moved,))
    if any(a > b for a, b in itertools.pairwise(moved)):
        call.refuse("takes whole shards away")
    if mode != "constant":
        if (low, high) == (0, 0) and all(shard.length(rank) for rank in range(shard.ranks)):
            return shard
        call.gathered = f"padding mode {mode!r} of the divided dim"
        whole = [(0, shard.size)] * call.ranks
        call.run = lambda local: cut(F.pad(local.rows(input, whole), sides, mode), outputs, call.rank)
        return outputs
    if at < len(sides):
        sides[at] = sides[at + 1] = 0
    wanted = [(a - low, b - low) for a, b in outputs.intervals()]
    call.run = lambda local: F.pad(local.rows(input, wanted, value or 0.0), sides, "constant", value)
    return outputs


def nonempty(rows: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Return the rows of an empty shard with `count` more, for operators that refuse to work on nothing.

    What others took of the rows has a way back by autograd all the same.
    """
    return torch.cat([rows, rows_like(rows, dim, count)], dim)


def rows_like(tensor: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Return new rows of zeros that go with a tensor."""
    shape = list(tensor.shape)
    shape[dim] = count
    return tensor.new_zeros(shape)


@rule("pixel_shuffle")
def pixel_shuffle(call: OperatorCall, input: Any, upscale_factor: int) -> Outcome:
    """Return how pixels lie that were groups of channels: whole groups must be on one rank."""
    shard, group = call.shard(input), upscale_factor**2
    if shard.dim == input.ndim - 3:
        if any(s % group or s // group % call.ranks for s in shard.segments) or not shard.equal:
            call.refuse("makes pixels of channels that are on several ranks")
        return shard.scaled(1, group)
    if shard.dim < input.ndim - 3:
        return call.alone(input)
    if not call.mine(shard):

        def run(local: Any) -> torch.Tensor:
            one = nonempty(local.tensors(input), shard.dim, 1)
            return F.pixel_shuffle(one, upscale_factor).narrow(shard.dim, 0, 0)

        call.run = run
    return shard.scaled(upscale_factor)


@rule("pixel_unshuffle")
def pixel_unshuffle(call: OperatorCall, input: Any, downscale_factor: int) -> Outcome:
    """Return how channels lie that were pixels, after moving the shards' borders to multiples of the factor."""
    shard, factor = call.shard(input), downscale_factor
    if shard.dim < input.ndim - 2:
        return call.alone(input).scaled(factor**2 if shard.dim == input.ndim - 3 else 1)
    call.exchange("makes channels of pixels that are on several ranks")
    if shard.size % factor:
        call.refuse(f"of {shard.size} pixels, which are no multiple of {factor}")
    outputs = shard.scaled(1, factor)
    wanted = outputs.scaled(factor).intervals()

    def run(local: Any) -> torch.Tensor:
        rows = local.rows(input, wanted)
        if call.mine(outputs):
            return F.pixel_unshuffle(rows, factor)
        return F.pixel_unshuffle(nonempty(rows, shard.dim, factor), factor).narrow(shard.dim, 0, 0)

    call.run = run
    return outputs


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
