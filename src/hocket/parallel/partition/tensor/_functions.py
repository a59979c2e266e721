"""The operations at the borders of what is cut, with their gradients: each is the other's reverse.

| operation | forward | backward |
|---|---|---|
| `copy_to` | nothing | all_reduce |
| `reduce_from` | all_reduce | nothing |
| `gather` | all_gather | this rank's part |
| `scatter` | this rank's part | all_gather |
| `gather_partial` | all_gather | reduce_scatter |
| `reduce_scatter` | reduce_scatter | all_gather |

Source: Shoeybi et al., Megatron-LM, 2019 (f and g); Korthikanti et al., Reducing Activation Recomputation, 2022
(their sequence-parallel forms).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hocket.sharding import Shard, cut, join

from ...batches import views_like
from ...mesh import World


def copy_to(world: World, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors, which are the same on all ranks, for use on parts: their gradients are added over the ranks.

    Several tensors of one type share one all_reduce.
    """
    if world.size == 1 or not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return tensors
    copies: tuple[torch.Tensor, ...] = _Copy.apply(world, *tensors)  # type: ignore[no-untyped-call]
    return copies


def reduce_from(world: World, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks."""
    return _applied(_Reduce, world, tensor)


def gather(world: World, tensor: torch.Tensor, split: Shard) -> torch.Tensor:
    """Return the full tensor from its parts, for use that is the same on all ranks."""
    return _applied(_Gather, world, tensor, split, False)


def gather_partial(world: World, tensor: torch.Tensor, split: Shard) -> torch.Tensor:
    """Return the full tensor from its parts, for use on parts of something else: gradients are added over the ranks."""
    return _applied(_Gather, world, tensor, split, True)


def scatter(world: World, tensor: torch.Tensor, split: Shard) -> torch.Tensor:
    """Return this rank's part of a tensor that all ranks have."""
    return _applied(_Scatter, world, tensor, split)


def reduce_scatter(world: World, tensor: torch.Tensor, split: Shard) -> torch.Tensor:
    """Return this rank's part of the sum over the ranks."""
    return _applied(_ReduceScatter, world, tensor, split)


def _applied(function: Any, world: World, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
    return tensor if world.size == 1 else function.apply(world, tensor, *how)


# Operations are called in one order on all ranks, for all run the same model on the same batch, and autograd goes
# through equal graphs in equal order.


def _all_gathered(world: World, tensor: torch.Tensor, split: Shard) -> torch.Tensor:
    tensor = tensor.contiguous()
    parts = tensor.new_empty((world.size, *tensor.shape))
    dist.all_gather_single(parts.view(-1), tensor.view(-1), group=world.group)
    if split.dim == 0 and len(split.bounds) == 1:
        return parts.flatten(0, 1)
    return join(parts.unbind(0), split)


def _reduce_scattered(world: World, tensor: torch.Tensor, split: Shard) -> torch.Tensor:
    parts = torch.stack([cut(tensor, split, rank) for rank in range(world.size)])
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter_single(mine.view(-1), parts.view(-1), group=world.group)
    return mine


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, world: World, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.world = world
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if len(gradients) == 1:
            return None, ctx.world.summed(gradients[0])
        total = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(total, group=ctx.world.group)
        return None, *views_like(total, gradients)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, world: World, tensor: torch.Tensor) -> torch.Tensor:
        return world.summed(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, gradients[0]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, world: World, tensor: torch.Tensor, split: Shard, partial: bool) -> torch.Tensor:
        ctx.world, ctx.split, ctx.partial = world, split, partial
        return _all_gathered(world, tensor, split)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        world: World = ctx.world
        if ctx.partial:
            return None, _reduce_scattered(world, gradients[0], ctx.split), None, None
        return None, cut(gradients[0], ctx.split, world.rank), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, world: World, tensor: torch.Tensor, split: Shard) -> torch.Tensor:
        ctx.world, ctx.split = world, split
        return cut(tensor, split, world.rank).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, _all_gathered(ctx.world, gradients[0], ctx.split), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, world: World, tensor: torch.Tensor, split: Shard) -> torch.Tensor:
        ctx.world, ctx.split = world, split
        return _reduce_scattered(world, tensor, split)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, _all_gathered(ctx.world, gradients[0], ctx.split), None
