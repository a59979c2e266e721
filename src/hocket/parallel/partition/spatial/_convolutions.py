"""Convolutions and transposed convolutions on slabs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ._register import rule
from ._site import CannotDivide, Site, each, join_rows, note, rows_like
from ._slabs import Window, divide_transposed, transposed_needs


def slide(
    site: Site,
    tensor: torch.Tensor,
    window: Window,
    compute: Callable[[torch.Tensor], torch.Tensor],
    fill: float = 0.0,
) -> torch.Tensor:
    """Applies what slides a window over the divided dim.

    Args:
        site: the call.
        tensor: this rank's slab.
        window: along the divided dim.
        compute: makes of rows, with padding already there, this rank's outputs.
        fill: what padding is made of.
    """
    slabs = site.slabs(tensor)
    outputs = window.divide(slabs)
    rows = site.fetch(tensor, [window.needed(one) for one in outputs.intervals()], fill)
    if site.mine(outputs):
        return torch.as_tensor(note(compute(rows), outputs))
    # No output is this rank's; what others took of its rows must have a way back all the same.
    rows = join_rows(slabs.dim, rows, rows_like(tensor, slabs.dim, window.reach))
    return torch.as_tensor(note(compute(rows).narrow(slabs.dim, 0, 0), outputs))


def windows(kernel: Any, stride: Any, padding: Any, dilation: Any, n: int, ceil: bool = False) -> list[Window]:
    """The windows along each of n dims, from the arguments of a torch function."""
    kernels, dilations = each(kernel, n), each(dilation, n)
    strides = each(stride, n) if stride is not None and stride != [] and stride != () else kernels
    if isinstance(padding, str):
        totals = [d * (k - 1) if padding == "same" else 0 for k, d in zip(kernels, dilations, strict=True)]
        sides = [(one // 2, one - one // 2) for one in totals]
    else:
        sides = [(one, one) for one in each(padding, n)]
    return [Window(kernels[i], strides[i], dilations[i], *sides[i], ceil) for i in range(n)]


@rule("conv2d", "conv3d")
def convolve(
    site: Site,
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """torch.nn.functional.conv2d and conv3d."""
    n = weight.ndim - 2
    slabs = site.slabs(input, n)
    along = windows(tuple(weight.shape[2:]), stride, padding, dilation, n)
    own = slabs.dim + n
    strides, dilations = each(stride, n), each(dilation, n)
    lows = [0 if i == own else window.low for i, window in enumerate(along)]
    uneven = [0 if i == own else window.high - window.low for i, window in enumerate(along)]

    def compute(rows: torch.Tensor) -> torch.Tensor:
        if any(uneven):
            rows = F.pad(rows, [size for one in reversed(uneven) for size in (0, one)])
        return torch.as_tensor(site.func(rows, weight, bias, strides, lows, dilations, groups))

    return slide(site, input, along[own], compute)


@rule("conv_transpose2d", "conv_transpose3d")
def convolve_transposed(
    site: Site,
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """torch.nn.functional.conv_transpose2d and conv_transpose3d."""
    n = weight.ndim - 2
    slabs = site.slabs(input, n)
    own = slabs.dim + n
    window = windows(tuple(weight.shape[2:]), stride, padding, dilation, n)[own]
    extra = list(each(output_padding, n))
    count = (slabs.size - 1) * window.stride - 2 * window.low + window.reach + extra[own]
    outputs = divide_transposed(window, slabs, count)
    wanted = [transposed_needs(window, one, slabs.size) for one in outputs.intervals()]
    rows = site.fetch(input, wanted)
    first, last = wanted[site.world.rank]
    if first == last:  # only padding, or nothing
        rows = join_rows(slabs.dim, rows, rows_like(input, slabs.dim, 1))
    lows = [0 if i == own else low for i, low in enumerate(each(padding, n))]
    extra[own] = 0
    made = site.func(rows, weight, None, each(stride, n), lows, extra, groups, each(dilation, n))
    # Row t of what was made is output t + first * stride - padding; beyond it no input reaches.
    begin, end = outputs.interval(site.world.rank)
    shift = first * window.stride - window.low
    low, high = max(begin, shift), min(end, shift + made.shape[slabs.dim])
    if low >= high or first == last:
        made = join_rows(slabs.dim, made.narrow(slabs.dim, 0, 0), rows_like(made, slabs.dim, end - begin))
    else:
        made = made.narrow(slabs.dim, low - shift, high - low)
        if low > begin or high < end:
            before, after = (rows_like(made, slabs.dim, size) for size in (low - begin, end - high))
            made = join_rows(slabs.dim, before, made, after)
    if bias is not None:
        made = made + bias.to(made.dtype).view(-1, *[1] * n)
    return note(made, outputs)


@rule("conv1d", "conv_transpose1d", "unfold", "fold")
def refuse(site: Site, *_: Any, **__: Any) -> Any:
    """What works on all rows at once."""
    raise CannotDivide(f"{site.name} is not made on slabs")
