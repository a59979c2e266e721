"""Upsampling on slabs: along the divided dim by a table of which inputs make each output, the others as torch does."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ._register import rule
from ._site import CannotDivide, Site, each, full_shape, join_rows, note, rows_like
from ._slabs import Interval, Slabs

_LINEAR = {"linear", "bilinear", "trilinear"}
_NEAREST = {"nearest", "nearest-exact"}


class _Table(NamedTuple):
    """Output o is (1 - weight[o]) * input[first[o]] + weight[o] * input[second[o]]."""

    first: torch.Tensor
    second: torch.Tensor
    weight: torch.Tensor

    def needed(self, outputs: Interval) -> Interval:
        """The inputs of an interval of outputs."""
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
    def of(cls, rows: torch.Tensor, own: int, sizes: Sequence[int]) -> _Like:
        """Of an input with `sizes` in all, of which dim `own` is divided."""
        layout = torch.contiguous_format
        last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(len(sizes))
        if last is not None and not rows.is_contiguous() and rows.is_contiguous(memory_format=last):
            layout = last
        others = tuple(min(2, one) for i, one in enumerate(sizes) if i != own)
        return cls(min(2, rows.shape[1]), others, layout)


@functools.lru_cache(maxsize=256)
def _table(size: int, count: int, factor: float | None, mode: str, align_corners: bool | None, like: _Like) -> _Table:
    """What torch itself makes of the numbers of the inputs, and of each input alone."""
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


@rule("interpolate", "upsample")
def interpolate(
    site: Site,
    input: torch.Tensor,  # noqa: A002
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """torch.nn.functional.interpolate to the nearest or linearly.

    Raises:
        CannotDivide: in other modes.
    """
    n = input.ndim - 2
    slabs = site.slabs(input, n)
    if mode not in _NEAREST | _LINEAR or antialias:
        raise CannotDivide(f"mode {mode!r}" + (" with antialias" if antialias else ""))
    own, sizes = slabs.dim + n, full_shape(input)[-n:]
    factors: list[float | None] = [None] * n
    if size is not None:
        counts = list(each(size, n))
    else:
        scales = (
            [float(scale_factor)] * n if isinstance(scale_factor, int | float) else [float(s) for s in scale_factor]
        )
        counts = [int(one * scale) for one, scale in zip(sizes, scales, strict=True)]
        if not recompute_scale_factor:
            factors = list(scales)
    like = _Like.of(input, own, sizes)
    table = _table(sizes[own], counts[own], factors[own], mode, align_corners, like)
    # An output is its owner's who has the input in its middle.
    inner = [-(-(2 * counts[own] * bound - slabs.size) // (2 * slabs.size)) for bound in slabs.bounds[1:-1]]
    outputs = Slabs(slabs.dim, (0, *(min(counts[own], max(0, one)) for one in inner), counts[own]))
    wanted = [table.needed(one) for one in outputs.intervals()]
    rows = site.fetch(input, wanted)
    begin, end = outputs.interval(site.world.rank)
    dim = slabs.dim
    if begin == end:
        rows = join_rows(dim, rows, rows_like(input, dim, 1))
        first = second = torch.zeros(1, dtype=torch.int64)
        weight = torch.zeros(1, dtype=torch.float64)
    else:
        low = wanted[site.world.rank][0]
        first, second, weight = table.first[begin:end] - low, table.second[begin:end] - low, table.weight[begin:end]
    made = rows.index_select(dim, first.to(rows.device)).contiguous(memory_format=like.layout)
    if bool(weight.any()):
        share = weight.to(rows.device, rows.dtype).view(-1, *[1] * (-1 - dim))
        made = made * (1 - share) + rows.index_select(dim, second.to(rows.device)) * share
    others = [i for i in range(n) if i != own and (counts[i] != sizes[i] or factors[i] is not None)]
    if others:
        made = _others(made, [made.shape[2 + i] if i == own else counts[i] for i in range(n)], factors, own, mode,
                       align_corners)  # fmt: skip
    if begin == end:
        made = made.narrow(dim, 0, 0)
    return note(made, outputs)


def _others(
    rows: torch.Tensor, counts: list[int], factors: list[float | None], own: int, mode: str, align_corners: bool | None
) -> torch.Tensor:
    """The other dims, by torch; along the divided one it changes nothing."""
    if all(one is None for one in factors):
        return F.interpolate(rows, size=counts, mode=mode, align_corners=align_corners)
    scales = [1.0 if i == own or one is None else one for i, one in enumerate(factors)]
    return F.interpolate(rows, scale_factor=scales, mode=mode, align_corners=align_corners)
