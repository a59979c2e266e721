"""The rows of a whole batch on every rank, of which each rank has its share."""

from __future__ import annotations

from typing import Any

import torch

from hocket import comm
from hocket.comm import torch_adapter
from hocket.parallel.batches import BatchShard
from hocket.parallel.mesh import World


def gathered(rows: torch.Tensor, share: BatchShard, world: World) -> torch.Tensor:
    """All rows of a batch, in its order, on every rank; a collective operation.

    Args:
        rows: this rank's, along the first axis; a row that is there only to keep step is left out.
        share: this rank's part.
        world: the ranks.
    """
    if world.size == 1:
        return rows.detach()
    if rows.dtype is torch.bool:
        return gathered(rows.view(torch.uint8), share, world).view(torch.bool)
    most = -(-share.total // world.size)
    mine = rows.detach()[: share.samples]
    if share.samples < most:
        mine = torch.cat([mine, mine.new_zeros((most - share.samples, *mine.shape[1:]))])
    whole = mine.new_empty((world.size * most, *mine.shape[1:]))
    with comm.label("keras rows"):
        torch_adapter.all_gather_single(whole.view(-1), mine.contiguous().view(-1), group=world.group)
    if most * world.size == share.total:
        return whole
    parts = [BatchShard.of(share.total, world.size, rank).samples for rank in range(world.size)]
    return torch.cat([whole[rank * most : rank * most + count] for rank, count in enumerate(parts)])


class _Gather(torch.autograd.Function):
    """Like `gathered`; the gradient of the own rows goes back, `factor` times, without another exchange.

    Every rank computes the same loss of the whole batch, so that what other ranks would send is known here already.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, share: BatchShard, world: World, factor: float) -> torch.Tensor:
        ctx.share, ctx.factor, ctx.shape = share, factor, rows.shape
        return gathered(rows, share, world)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        share: BatchShard = ctx.share
        mine = gradient.new_zeros(ctx.shape)
        mine[: share.samples] = gradient[share.begin : share.end] * ctx.factor
        return mine, None, None, None


def gathered_with_gradient(rows: torch.Tensor, share: BatchShard, world: World, factor: float) -> torch.Tensor:
    """Like `gathered`, and the gradient with respect to the own rows is `factor` times that of the result's."""
    if world.size == 1:
        return rows
    if not rows.requires_grad:
        return gathered(rows, share, world)
    whole: torch.Tensor = _Gather.apply(rows, share, world, factor)  # type: ignore[no-untyped-call]
    return whole
