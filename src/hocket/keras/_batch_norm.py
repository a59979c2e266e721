"""Keras' batch norm with the statistics of the whole batch, which Keras' torch backend has not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch
import torch.distributed as dist

from hocket import comm
from hocket.parallel.batches import BatchShard
from hocket.parallel.mesh import World


class _AllReduceSum(torch.autograd.Function):
    """The sum over ranks; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, world: World) -> torch.Tensor:
        ctx.world = world
        return _reduced(value, world)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _reduced(gradients[0], ctx.world), None


def _reduced(value: torch.Tensor, world: World) -> torch.Tensor:
    total = value.detach().clone()
    with comm.label("batch norm"):
        dist.all_reduce(total, group=world.group)
    return total


@contextmanager
def synchronised(model: Any, world: World, share: Callable[[], BatchShard | None]) -> Iterator[None]:
    """Open a block in which every BatchNormalization in `model` takes mean and variance over all ranks' samples.

    One all_reduce forward (counts, sums and sums of squares, in float64 so that subtracting the squared mean loses
    nothing) and one backward for each layer, as in hocket.parallel's own batch norm. `share` tells this rank's part of
    the batch in work; None outside of a step.
    """
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    for layer in layers:
        layer.__dict__["_moments"] = _moments_of(layer, world, share)
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("_moments", None)


def _moments_of(layer: Any, world: World, share: Callable[[], BatchShard | None]) -> Callable[..., Any]:
    def moments(inputs: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        part = share()
        if part is None:
            mean, variance = type(layer)._moments(layer, inputs, mask)
            return mean, variance
        axes = layer._reduction_axes
        here = len(inputs) if part.samples else 0  # of a sample that is here to keep step, nothing
        mine = inputs[:here].double()
        weights = torch.ones_like(mine)
        if mask is not None:
            weights = mask[:here].unsqueeze(-1).expand(mine.shape).double()
        sums = torch.stack([weights.sum(axes), (mine * weights).sum(axes), (mine.square() * weights).sum(axes)])
        total: Any = _AllReduceSum.apply(sums, world)  # type: ignore[no-untyped-call]
        count, first, second = total
        count = count.clamp(min=1e-7)
        mean = first / count
        variance = (second / count - mean.square()).clamp(min=0.0)
        return mean.to(inputs.dtype), variance.to(inputs.dtype)

    return moments
