"""Rules of normalisation: statistics are those of the full tensor."""

import math
from typing import Any

import torch
import torch.nn.functional as F

from ._call import Local, OperatorCall, Outcome
from ._placement import REPLICATED
from ._table import rule


@rule("batch_norm")
def batch_norm(
    call: OperatorCall,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Outcome:
    """Return how normalised channels lie; also of replicated inputs, where ranks of other samples share statistics."""
    shard = input.shard
    call.replicated(running_mean, running_var, weight, bias)
    if shard is not None and shard.dim == 1:
        call.refuse("has statistics of channels that are divided")
    if training and shard is not None:
        call.exchange("has statistics of the full tensor")

    def run(local: Local) -> torch.Tensor:
        x, mean, var, w, b = local.tensors((input, running_mean, running_var, weight, bias))
        made = local.peers.batch_norm(x, shard is not None, w, b, eps) if training else None
        if made is None:
            return torch.as_tensor(F.batch_norm(x, mean, var, w, b, training, momentum, eps))
        out, batch_mean, batch_var, total = made
        if mean is not None and var is not None:
            with torch.no_grad():
                unbiased = batch_var * (total / (total - 1).clamp(min=1))
                mean.lerp_(batch_mean.to(mean.dtype), momentum)
                var.lerp_(unbiased.to(var.dtype), momentum)
        return out

    call.run = run
    return shard or REPLICATED


@rule("group_norm")
def group_norm(
    call: OperatorCall, input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Outcome:
    """Return how normalised groups lie: two sums over ranks, of values and of squared distances from the mean."""
    shard = call.shard(input)
    call.replicated(weight, bias)
    if shard.dim == 0:
        return call.alone(input)
    if shard.dim == 1:
        call.refuse("has statistics of channels that are divided")
    call.exchange("has statistics of the full tensor")
    samples, channels = input.shape[:2]
    count = math.prod(input.shape[1:]) / num_groups

    def run(local: Local) -> torch.Tensor:
        x, w, b = local.tensors((input, weight, bias))
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        grouped = wide.reshape(samples, num_groups, channels // num_groups, *x.shape[2:])
        axes = tuple(range(2, grouped.ndim))
        centred = grouped - local.peers.total(grouped.sum(axes, keepdim=True)) / count
        variance = local.peers.total(centred.square().sum(axes, keepdim=True)) / count
        out = (centred * torch.rsqrt(variance + eps)).reshape(x.shape)
        shape = (-1, *[1] * (x.ndim - 2))
        out = out if w is None else out * w.view(shape)
        return torch.as_tensor((out if b is None else out + b.view(shape)).to(x.dtype))

    call.run = run
    return shard


@rule("instance_norm")
def instance_norm(
    call: OperatorCall,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Outcome:
    """Return how normalised channels of each sample lie, without running statistics."""
    if running_mean is not None or running_var is not None or not use_input_stats:
        call.refuse("has running statistics")
    call.replicated(weight, bias)
    if call.shard(input).dim == 0:
        return call.alone(input)
    return group_norm(call, input, input.shape[1], weight, bias, eps)


@rule("local_response_norm")
def local_response_norm(call: OperatorCall, input: Any, *args: Any, **kwargs: Any) -> Outcome:
    """Return how channels lie that are normalised by those beside them."""
    if call.shard(input).dim == 1:
        call.refuse("mixes the channels that are divided")
    return call.alone(input)


@rule("layer_norm", "rms_norm")
def layer_norm(call: OperatorCall, input: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Outcome:
    """Return how results lie that are normalised over dims that are not divided."""
    shard = call.shard(input)
    call.replicated(*args, *kwargs.values())
    if shard.dim >= input.ndim - len(normalized_shape):
        call.refuse("normalises over the dim that is divided")
    return shard
