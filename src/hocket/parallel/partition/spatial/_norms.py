"""Normalisation on slabs: statistics are those of the full tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...batches import batch as _batch
from ...data import normalise
from ._register import rule
from ._site import CannotDivide, Site, full_shape, note, noted


@rule("batch_norm")
def batch_norm(
    site: Site,
    input: torch.Tensor,  # noqa: A002
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """torch.nn.functional.batch_norm; also of whole tensors, where other samples' ranks share the statistics."""
    slabs = noted(input)
    world = site.groups.samples if slabs is None else site.groups.statistics
    if not training or world.size == 1:
        return note(F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps), slabs)
    out, mean, variance, total = normalise(input, weight, bias, eps, world, _batch.counts())
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = variance * (total / (total - 1).clamp(min=1))
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return note(out, slabs)


@rule("group_norm")
def group_norm(
    site: Site,
    input: torch.Tensor,  # noqa: A002
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """torch.nn.functional.group_norm: two sums over ranks, of values and of their squared distances from the mean."""
    slabs = site.slabs(input, input.ndim - 2)
    samples, channels = input.shape[:2]
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    grouped = wide.reshape(samples, num_groups, channels // num_groups, *input.shape[2:])
    axes = tuple(range(2, grouped.ndim))
    count = full_shape(input)[1:].numel() / num_groups
    centred = grouped - site.total(grouped.sum(axes, keepdim=True)) / count
    variance = site.total(centred.square().sum(axes, keepdim=True)) / count
    out = (centred * torch.rsqrt(variance + eps)).reshape(input.shape)
    shape = (-1, *[1] * (input.ndim - 2))
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    return note(out.to(input.dtype), slabs)


@rule("instance_norm")
def instance_norm(
    site: Site,
    input: torch.Tensor,  # noqa: A002
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """torch.nn.functional.instance_norm without running statistics.

    Raises:
        CannotDivide: with them.
    """
    if running_mean is not None or running_var is not None or not use_input_stats:
        raise CannotDivide("instance norm has running statistics")
    return group_norm(site, input, input.shape[1], weight, bias, eps)


@rule("layer_norm", "rms_norm")
def layer_norm(site: Site, input: torch.Tensor, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
    """torch.nn.functional.layer_norm of dims that are not divided."""
    slabs = site.slabs(input)
    if -slabs.dim <= len(normalized_shape):
        raise CannotDivide("it normalises over the divided dim")
    return note(site.func(input, normalized_shape, *args, **kwargs), slabs)
