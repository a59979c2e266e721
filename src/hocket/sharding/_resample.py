"""Rules of upsampling: along the divided dim by a table of which inputs make each output, the others as torch does.

Pixels that are made of channels, or channels of pixels, are here too.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ._call import Local, OperatorCall, Outcome
from ._padding import nonempty
from ._placement import Interval, Shard
from ._table import rule
from ._windowed import each

_LINEAR = {"linear", "bilinear", "trilinear"}
_NEAREST = {"nearest", "nearest-exact"}


class _Table(NamedTuple):
    """Output o is (1 - weight[o]) * input[first[o]] + weight[o] * input[second[o]]."""

    first: torch.Tensor
    second: torch.Tensor
    weight: torch.Tensor

    def needed(self, outputs: Interval) -> Interval:
        """Return the inputs of an interval of outputs."""
        begin, end = outputs
        if begin >= end:
            return 0, 0
        return int(self.first[begin:end].min()), int(self.second[begin:end].max()) + 1


class _Like(NamedTuple):
    """What else of the input decides how torch rounds: one or more channels and rows, and how they lie in memory."""

    channels: int
    others: tuple[int, ...]
    layout: torch.memory_format

    @classmethod
    def of(cls, rows: torch.Tensor, own: int, sizes: Sequence[int]) -> "_Like":
        """Of an input with `sizes` in all, of which dim `own` is divided."""
        layout = torch.contiguous_format
        last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(len(sizes))
        if last is not None and not rows.is_contiguous() and rows.is_contiguous(memory_format=last):
            layout = last
        others = tuple(min(2, one) for i, one in enumerate(sizes) if i != own)
        return cls(min(2, rows.shape[1]), others, layout)


@functools.lru_cache(maxsize=256)
def _table(size: int, count: int, factor: float | None, mode: str, align_corners: bool | None, like: _Like) -> _Table:
    """Return what torch itself makes of the numbers of the inputs, and of each input alone."""
    target: dict[str, Any] = {"size": count} if factor is None else {"scale_factor": factor}
    if mode in _NEAREST:  # torch rounds otherwise in two dims than in one or three, and for channels that lie together
        numbers = torch.arange(size, dtype=torch.float64).view(1, 1, -1, *[1] * len(like.others))
        numbers = numbers.expand(1, like.channels, size, *like.others).contiguous(memory_format=like.layout)
        if factor is None:
            target = {"size": [count, *like.others]}
        else:
            target = {"scale_factor": [factor] + [1.0] * len(like.others)}
        first = F.interpolate(numbers, mode=mode, **target)[0, 0].reshape(count, -1)[:, 0].round().long()
        return _Table(first, first, torch.zeros(len(first), dtype=torch.float64))
    alone = torch.eye(size, dtype=torch.float64)[None]
    matrix = F.interpolate(alone, mode="linear", align_corners=align_corners, **target)[0]  # (inputs, outputs)
    used = matrix != 0
    first = used.to(torch.uint8).argmax(0)
    second = size - 1 - used.flip(0).to(torch.uint8).argmax(0)
    weight = matrix[second, torch.arange(matrix.shape[1])]
    return _Table(first, second, torch.where(first == second, 0.0, weight))


@rule("interpolate")
def interpolate(
    call: OperatorCall,
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Outcome:
    """Return how an upsampled tensor lies; along the divided dim to the nearest or linearly."""
    n, shard = input.ndim - 2, call.shard(input)
    if shard.dim < 2:
        return call.alone(input)
    call.exchange("works along the dim that is divided")
    if mode not in _NEAREST | _LINEAR or antialias:
        call.refuse(f"in mode {mode!r}" + (" with antialias" if antialias else ""))
    if mode in _LINEAR and not input.dtype.is_floating_point:
        call.refuse("linearly between whole numbers")
    own, sizes = shard.dim - 2, input.shape[-n:]
    factors: list[float | None] = [None] * n
    if size is not None:
        counts = list(each(size, n))
    else:
        scales = [float(one) for one in ([scale_factor] * n if isinstance(scale_factor, int | float) else scale_factor)]
        counts = [int(one * scale) for one, scale in zip(sizes, scales, strict=True)]
        if not recompute_scale_factor:
            factors = list(scales)
    # An output is its owner's who has the input in its middle.
    (bounds,) = shard.bounds
    inner = [-(-(2 * counts[own] * bound - shard.size) // (2 * shard.size)) for bound in bounds[1:-1]]
    outputs = Shard(shard.dim, ((0, *(min(counts[own], max(0, one)) for one in inner), counts[own]),))
    begin, end = outputs.intervals()[call.rank]
    others = [i for i in range(n) if i != own and (counts[i] != sizes[i] or factors[i] is not None)]
    dim = shard.dim

    def run(local: Local) -> torch.Tensor:
        like = _Like.of(local.tensors(input), own, sizes)
        table = _table(sizes[own], counts[own], factors[own], mode, align_corners, like)
        wanted = [table.needed(one) for one in outputs.intervals()]
        rows = local.rows(input, wanted)
        if begin == end:
            rows = nonempty(rows, dim, 1)
            first = second = torch.zeros(1, dtype=torch.int64)
            weight = torch.zeros(1, dtype=torch.float64)
        else:
            low = wanted[call.rank][0]
            first, second, weight = table.first[begin:end] - low, table.second[begin:end] - low, table.weight[begin:end]
        made = rows.index_select(dim, first.to(rows.device)).contiguous(memory_format=like.layout)
        if bool(weight.any()):
            share = weight.to(rows.device, rows.dtype).view(-1, *[1] * (rows.ndim - 1 - dim))
            made = made * (1 - share) + rows.index_select(dim, second.to(rows.device)) * share
        if others:
            sizes_now = [made.shape[2 + i] if i == own else counts[i] for i in range(n)]
            made = _others(made, sizes_now, factors, own, mode, align_corners)
        return made.narrow(dim, 0, 0) if begin == end else made

    call.run = run
    return outputs


def _others(
    rows: torch.Tensor, counts: list[int], factors: list[float | None], own: int, mode: str, align_corners: bool | None
) -> torch.Tensor:
    """Resample the other dims, by torch; along the divided one it changes nothing."""
    if all(one is None for one in factors):
        return F.interpolate(rows, size=counts, mode=mode, align_corners=align_corners)
    scales = [1.0 if i == own or one is None else one for i, one in enumerate(factors)]
    return F.interpolate(rows, scale_factor=scales, mode=mode, align_corners=align_corners)


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
