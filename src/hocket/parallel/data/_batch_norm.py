"""Batch norm whose statistics are those of the samples of several ranks, and buffers kept as rank 0 has them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hocket import comm
from hocket.comm import torch_adapter

from ..batches import batch as _batch
from ..mesh import World
from ..state import FlatBundles


class _Normalise(torch.autograd.Function):
    """Normalises each channel by the mean and variance over all ranks' samples (Ioffe and Szegedy 2015, algorithm 1).

    One all_reduce forward, of counts, sums and sums of squares in float64 (so that subtracting the squared mean loses
    nothing), and one backward, of the two sums over the batch that the gradient of the input needs.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, world: World, counts: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        axes = [0, *range(2, x.ndim)]
        shape = [1, -1] + [1] * (x.ndim - 2)
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        count = x.numel() / x.shape[1] if counts else 0.0
        sums = torch.zeros(1 + 2 * x.shape[1], dtype=torch.float64, device=x.device)
        if count:
            variance, mean = torch.var_mean(wide, axes, correction=0)
            mean, variance = mean.double(), variance.double()
            sums[0] = count
            sums[1:] = count * torch.cat([mean, variance + mean.square()])
        with comm.label("batch norm"):
            world.all_reduce(sums)
        total = sums[0]
        mean, square = (sums[1:] / total).chunk(2)
        variance = (square - mean.square()).clamp_(min=0.0)
        scale = torch.rsqrt(variance + eps).to(wide.dtype)
        centred = (wide - mean.to(wide.dtype).view(shape)) * scale.view(shape)
        ctx.save_for_backward(centred, weight, scale, total)
        ctx.world, ctx.axes, ctx.shape, ctx.counts, ctx.dtype = world, axes, shape, counts, x.dtype
        out = centred
        if weight is not None:
            out = out * weight.view(shape) + bias.view(shape)
        mean, variance, total = mean.clone(), variance.clone(), total.clone()
        ctx.mark_non_differentiable(mean, variance, total)
        return out.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        centred, weight, scale, total = ctx.saved_tensors
        gradient = gradients[0].to(centred.dtype)
        shape, axes = ctx.shape, ctx.axes
        of_bias, of_weight = gradient.sum(axes), (gradient * centred).sum(axes)
        if not ctx.counts:  # a sample that is here to keep step has changed no statistics
            of_bias, of_weight = torch.zeros_like(of_bias), torch.zeros_like(of_weight)
        sums = torch.cat([of_bias, of_weight]).double()
        with comm.label("batch norm"):
            ctx.world.all_reduce(sums)
        mean_gradient, mean_product = (sums / total).to(centred.dtype).chunk(2)
        if ctx.counts:
            gradient = gradient - mean_gradient.view(shape) - centred * mean_product.view(shape)
        factor = scale if weight is None else scale * weight
        inward = (gradient * factor.view(shape)).to(ctx.dtype)
        if weight is None:
            return inward, None, None, None, None, None
        return inward, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None, None


def normalise(
    x: torch.Tensor, weight: Any, bias: Any, eps: float, world: World, counts: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise over the samples of all ranks of a group; a collective operation.

    Args:
        x: (samples, channels, ...); any part may be other ranks', or none this rank's.
        weight: Weight of each channel, or None.
        bias: Bias of each channel, or None.
        eps: What is added to the variance.
        world: The ranks.
        counts: Whether this rank's samples count in the statistics.

    Returns:
        What x becomes, and of each channel mean and (biased) variance, and of how many values they are.
    """
    function: Any = _Normalise
    made: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    made = function.apply(x, weight, bias, eps, world, counts)
    return made


class SynchronisedBatchNorm(_BatchNorm):
    """Batch norm over the samples of all ranks of a group; made of the user's module by `synchronise`.

    It holds the same parameters and buffers under the same names. In evaluation it is the plain one. Its running
    statistics are the same on all ranks of the group, so they need not be sent.
    """

    world: World

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002
        if input.ndim < 2:
            raise ValueError(f"expected an input of at least 2 axes (samples, channels), not {input.ndim}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Normalises."""
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        out, mean, variance, total = normalise(input, self.weight, self.bias, self.eps, self.world, _batch.counts())
        # Activation checkpointing comes here a second time, in back-propagation.
        if self.track_running_stats and not torch_adapter.in_backward():
            self._track(mean, variance, total)
        return torch.as_tensor(out)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (total / (total - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def synchronise(model: nn.Module, world: World) -> list[str]:
    """Make every batch norm in `model` one over all ranks of `world`, in place.

    Modules, parameters and buffers stay the same objects, so optimizers and hooks go on to work.

    Returns:
        The names of the modules that were changed.
    """
    changed = []
    for name, module in model.named_modules():
        if type(module) in _PLAIN and world.size > 1:
            module.__class__ = SynchronisedBatchNorm
            module.world = world
            changed.append(name)
    return changed


def _synchronised_buffers(model: nn.Module, world: World) -> set[int]:
    """Return ids of the buffers that are the same on all ranks of `world` by themselves."""
    return {
        id(buffer)
        for module in model.modules()
        if isinstance(module, SynchronisedBatchNorm) and module.world.size == world.size
        for buffer in module.buffers(recurse=False)
    }


class BroadcastBuffers:
    """The buffers of some modules, but for those that are the same on all ranks by themselves."""

    def __init__(self, modules: Sequence[torch.nn.Module], world: World) -> None:
        self._modules = list(modules)
        self._world = world
        self._bundles = FlatBundles(world)
        self._equal = set().union(*(_synchronised_buffers(m, world) for m in modules)) if modules else set()

    def send(self) -> None:
        """Give all data-parallel ranks rank 0's; a collective operation."""
        if self._world.size == 1:
            return
        self._bundles.broadcast(b for module in self._modules for b in module.buffers() if id(b) not in self._equal)
