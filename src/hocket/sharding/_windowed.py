"""Rules of what slides a window over spatial dims: convolutions, transposed convolutions, poolings.

Along other dims than those that are convolved or pooled every shard is worked on alone. Along a spatial dim each rank
makes the outputs whose windows have their middles in its shard, and fetches the halo: the rows that it lacks.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ._call import Local, Operand, OperatorCall, Outcome
from ._padding import nonempty, rows_like
from ._placement import REPLICATED, Shard
from ._products import layered
from ._reductions import totalled
from ._table import rule
from ._windows import SlidingWindow


def each(value: Any, n: int) -> tuple[int, ...]:
    """Return one number for each of n dims."""
    if isinstance(value, int):
        return (value,) * n
    return tuple(value) * n if len(value) == 1 else tuple(value)


def windows(kernel: Any, stride: Any, padding: Any, dilation: Any, n: int, ceil: bool = False) -> list[SlidingWindow]:
    """Return the windows along each of n dims, from the arguments of a torch function."""
    kernels, dilations = each(kernel, n), each(dilation, n)
    strides = each(stride, n) if stride is not None and stride != [] and stride != () else kernels
    if isinstance(padding, str):
        totals = [d * (k - 1) if padding == "same" else 0 for k, d in zip(kernels, dilations, strict=True)]
        sides = [(one // 2, one - one // 2) for one in totals]
    else:
        sides = [(one, one) for one in each(padding, n)]
    return [SlidingWindow(kernels[i], strides[i], dilations[i], *sides[i], ceil) for i in range(n)]


def _spatial(call: OperatorCall, input: Operand, n: int, channels: bool) -> int | None:
    """Return which of the n spatial dims is divided; None where none is, and every shard is worked on alone.

    `channels` says whether the operator mixes channels; the n spatial dims are the last ones.

    Raises:
        CannotShard: channels are divided and mixed, or ranks do not exchange rows.
    """
    shard = call.shard(input)
    own = shard.dim - (input.ndim - n)
    if own >= 0:
        call.exchange("works along the dim that is divided")
        return own
    if own == -1 and channels:
        call.refuse("mixes the channels that are divided")
    return None


def _slide(
    call: OperatorCall,  # the call
    input: Operand,  # its input
    window: SlidingWindow,  # the window along the divided dim
    # makes of rows, with padding already there, this rank's outputs
    compute: Callable[[torch.Tensor, Local], torch.Tensor],
    fill: float = 0.0,  # what padding is made of
) -> Shard:
    """Have an operator slide its window over the divided dim."""
    shard = call.shard(input)
    outputs = window.divide(shard)
    if outputs.size <= 0:
        call.refuse("has no outputs")
    wanted = [window.needed(one) for one in outputs.intervals()]

    def run(local: Local) -> torch.Tensor:
        rows = local.rows(input, wanted, fill)
        if call.mine(outputs):
            return compute(rows, local)
        return compute(nonempty(rows, shard.dim, window.reach), local).narrow(shard.dim, 0, 0)

    call.run = run
    return outputs


@rule("conv1d", "conv2d", "conv3d")
def convolve(
    call: OperatorCall,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Outcome:
    """Return how the outputs of a convolution lie."""
    n = weight.ndim - 2
    mixed = input.shard is not None and input.shard.dim == input.ndim - n - 1
    if weight.shard is not None or (mixed and not call.exchanges):
        if groups != 1:
            call.refuse("has groups of the channels that are divided")
        sides = padding if isinstance(padding, str) else each(padding, n)
        function, settings = call.func, (each(stride, n), sides, each(dilation, n), groups)
        return layered(call, input, weight, bias, (0, 1), lambda x, w, b=None: function(x, w, b, *settings), -n - 1)
    call.replicated(weight, bias)
    own = _spatial(call, input, n, True)
    if own is None:
        return call.alone(input)
    along = windows(tuple(weight.shape[2:]), stride, padding, dilation, n)
    strides, dilations = each(stride, n), each(dilation, n)
    lows = [0 if i == own else window.low for i, window in enumerate(along)]
    uneven = [0 if i == own else window.high - window.low for i, window in enumerate(along)]

    def compute(rows: torch.Tensor, local: Local) -> torch.Tensor:
        if any(uneven):
            rows = F.pad(rows, [size for one in reversed(uneven) for size in (0, one)])
        w, b = local.tensors((weight, bias))
        return torch.as_tensor(local.func(rows, w, b, strides, lows, dilations, groups))

    return _slide(call, input, along[own], compute)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolve_transposed(
    call: OperatorCall,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Outcome:
    """Return how the outputs of a transposed convolution lie."""
    call.replicated(weight, bias)
    n = weight.ndim - 2
    own = _spatial(call, input, n, True)
    shard = call.shard(input)
    if own is None:
        return call.alone(input)
    window = windows(tuple(weight.shape[2:]), stride, padding, dilation, n)[own]
    extra = list(each(output_padding, n))
    count = (shard.size - 1) * window.stride - 2 * window.low + window.reach + extra[own]
    extra[own] = 0
    outputs = window.divide_transposed(shard, count)
    wanted = [window.needed_transposed(one, shard.size) for one in outputs.intervals()]
    first, last = wanted[call.rank]
    begin, end = outputs.intervals()[call.rank]
    lows = [0 if i == own else low for i, low in enumerate(each(padding, n))]
    dim = shard.dim

    def run(local: Local) -> torch.Tensor:
        rows = local.rows(input, wanted)
        if first == last:  # only padding, or nothing
            rows = nonempty(rows, dim, 1)
        w, b = local.tensors((weight, bias))
        made: torch.Tensor = local.func(rows, w, None, each(stride, n), lows, extra, groups, each(dilation, n))
        # Row t of what was made is output t + first * stride - padding; beyond it no input reaches.
        shift = first * window.stride - window.low
        low, high = max(begin, shift), min(end, shift + made.shape[dim])
        if low >= high or first == last:
            made = nonempty(made.narrow(dim, 0, 0), dim, end - begin)
        else:
            made = made.narrow(dim, low - shift, high - low)
            if low > begin or high < end:
                before, after = (rows_like(made, dim, size) for size in (low - begin, end - high))
                made = torch.cat([before, made, after], dim)
        return made if b is None else made + b.to(made.dtype).view(-1, *[1] * n)

    call.run = run
    return outputs


@rule("max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(
    call: OperatorCall,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Outcome:
    """Return how maxima over windows lie."""
    n = int(call.name[-2])
    own = _spatial(call, input, n, False)
    if own is None:
        return call.alone(input)
    if return_indices:
        call.refuse("makes indices that are those of the full tensor")
    along = windows(kernel_size, stride, padding, dilation, n, ceil_mode)
    lows = [0 if i == own else window.low for i, window in enumerate(along)]
    strides = [window.stride for window in along]
    function: Any = getattr(F, call.name)
    fill = float("-inf") if input.dtype.is_floating_point else torch.iinfo(input.dtype).min

    def compute(rows: torch.Tensor, local: Local) -> torch.Tensor:
        return torch.as_tensor(function(rows, each(kernel_size, n), strides, lows, each(dilation, n), ceil_mode))

    return _slide(call, input, along[own], compute, fill)


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def average_pool(
    call: OperatorCall,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Outcome:
    """Return how means over windows lie: sums on shards, divided by the size of each window in the full tensor."""
    n = int(call.name[-2])
    own = _spatial(call, input, n, False)
    if own is None:
        return call.alone(input)
    if n == 1 or not input.dtype.is_floating_point:
        call.refuse("works along the dim that is divided")
    along = windows(kernel_size, stride, padding, 1, n, ceil_mode)
    lows = [0 if i == own else window.low for i, window in enumerate(along)]
    strides = [window.stride for window in along]
    function: Any = getattr(F, call.name)
    outputs = along[own].divide(call.shard(input)).intervals()

    def compute(rows: torch.Tensor, local: Local) -> torch.Tensor:
        wide = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
        sums: torch.Tensor = function(wide, each(kernel_size, n), strides, lows, ceil_mode, True, 1)
        if divisor_override is not None:
            return (sums / divisor_override).to(rows)
        divisor = sums.new_ones(())
        for i, (window, size) in enumerate(zip(along, input.shape[-n:], strict=True)):
            counts = _counts(window, size, count_include_pad).to(sums)
            if i == own and call.rank < len(outputs) and outputs[call.rank][0] < outputs[call.rank][1]:
                counts = counts[slice(*outputs[call.rank])]
            elif i == own:  # a row that goes again
                counts = counts[:1]
            divisor = divisor * counts.view(-1, *[1] * (n - 1 - i))
        return (sums / divisor).to(rows)

    return _slide(call, input, along[own], compute)


def _counts(window: SlidingWindow, size: int, with_padding: bool) -> torch.Tensor:
    """Return by what torch divides each window's sum along one dim."""
    begin = torch.arange(window.outputs(size)) * window.stride - window.low
    end = (begin + window.kernel).clamp(max=size + window.low)
    return end - begin if with_padding else end.clamp(max=size) - begin.clamp(min=0)


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_average_pool(call: OperatorCall, input: Any, output_size: Any) -> Outcome:
    """Return how adaptive means lie; over the divided dim to one value for each channel only."""
    n = int(call.name[-2])
    if _spatial(call, input, n, False) is None:
        return call.alone(input)
    if output_size is None or set(each(output_size, n)) != {1}:
        call.refuse("has windows that are not those of a convolution")
    count = math.prod(input.shape[-n:])
    call.run = lambda local: totalled(local, local.tensors(input), count, tuple(range(-n, 0)), True)
    return REPLICATED


@rule(*[f"{kind}{n}d" for kind in ("adaptive_max_pool", "lp_pool") for n in (1, 2, 3)],
      *[f"max_pool{n}d_with_indices" for n in (1, 2, 3)])  # fmt: skip
def other_pool(call: OperatorCall, input: Any, *args: Any, **kwargs: Any) -> Outcome:
    """Return how the results of other poolings lie, along other dims than those that are pooled."""
    n = int(call.name[call.name.index("pool") + 4])
    if _spatial(call, input, n, False) is not None:
        call.refuse("works along the dim that is divided")
    return call.alone(input)
