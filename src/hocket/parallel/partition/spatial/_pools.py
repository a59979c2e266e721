"""Poolings on slabs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ._convolutions import slide, windows
from ._register import rule
from ._site import CannotDivide, Site, each, full_shape, note
from ._slabs import Window


@rule("max_pool2d", "max_pool3d")
def max_pool(
    site: Site,
    input: torch.Tensor,  # noqa: A002
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """torch.nn.functional.max_pool2d and max_pool3d."""
    if return_indices:
        raise CannotDivide("the indices of maxima are those of the full tensor")
    n = 2 if site.name.endswith("2d") else 3
    own = site.slabs(input, n).dim + n
    along = windows(kernel_size, stride, padding, dilation, n, ceil_mode)
    lows = [0 if i == own else window.low for i, window in enumerate(along)]
    strides = [window.stride for window in along]
    function: Any = F.max_pool2d if n == 2 else F.max_pool3d
    fill = float("-inf") if input.is_floating_point() else torch.iinfo(input.dtype).min

    def compute(rows: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(function(rows, each(kernel_size, n), strides, lows, each(dilation, n), ceil_mode))

    return slide(site, input, along[own], compute, fill)


@rule("avg_pool2d", "avg_pool3d")
def average_pool(
    site: Site,
    input: torch.Tensor,  # noqa: A002
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """torch.nn.functional.avg_pool2d and avg_pool3d: sums on slabs, divided by the size of each window."""
    n = 2 if site.name.endswith("2d") else 3
    slabs = site.slabs(input, n)
    own = slabs.dim + n
    along = windows(kernel_size, stride, padding, 1, n, ceil_mode)
    lows = [0 if i == own else window.low for i, window in enumerate(along)]
    strides = [window.stride for window in along]
    function: Any = F.avg_pool2d if n == 2 else F.avg_pool3d

    def compute(rows: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(function(rows, each(kernel_size, n), strides, lows, ceil_mode, True, 1))

    sums = slide(site, input, along[own], compute)
    outputs = site.slabs(sums)
    if divisor_override is not None:
        return note(sums / divisor_override, outputs)
    sizes = full_shape(input)[-n:]
    divisor = sums.new_ones(())
    for i, (window, size) in enumerate(zip(along, sizes, strict=True)):
        counts = _counts(window, size, count_include_pad).to(sums)
        if i == own:
            begin, end = outputs.interval(site.world.rank)
            counts = counts[begin:end]
        divisor = divisor * counts.view(-1, *[1] * (n - 1 - i))
    return note(sums / divisor, outputs)


def _counts(window: Window, size: int, with_padding: bool) -> torch.Tensor:
    """By what torch divides each window's sum along one dim."""
    begin = torch.arange(window.outputs(size)) * window.stride - window.low
    end = (begin + window.kernel).clamp(max=size + window.low)
    return end - begin if with_padding else end.clamp(max=size) - begin.clamp(min=0)


@rule("adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_average_pool(site: Site, input: torch.Tensor, output_size: Any) -> Any:  # noqa: A002
    """torch.nn.functional.adaptive_avg_pool2d and adaptive_avg_pool3d to one value for each channel: sums are added up.

    Raises:
        CannotDivide: to several values.
    """
    n = 2 if site.name.endswith("2d") else 3
    site.slabs(input, n)
    if output_size is None or set(each(output_size, n)) != {1}:
        raise CannotDivide("its windows are not those of a convolution")
    count = full_shape(input)[-n:].numel()
    return site.total(input.sum(tuple(range(-n, 0)), keepdim=True)) / count
