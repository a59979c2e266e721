"""The two operations that cross ranks: fetching rows that others own, and adding up. Each with its gradient.

| operation | forward | backward |
|---|---|---|
| `fetch` | all_to_all of the rows that are wanted and not owned | the same rows' gradients back, added by their owner |
| `total` | all_reduce | all_reduce |

Gradients obey one rule: that of a divided tensor is complete where a rank owns it; those of a tensor that every rank
has whole (a parameter, the loss) add up, over the ranks, to the gradient. So a whole tensor may be used with shards
without any communication, and the gradients of parameters have to be summed in the end, as data parallelism does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hocket import comm
from hocket.sharding import Interval, Shard, halo_rows, overlap

from ...mesh import World

LABEL = "halo"
"""What `hocket.comm` calls the exchanges of rows when it announces them."""


def fetch(
    world: World, tensor: torch.Tensor, shard: Shard, wanted: Sequence[Interval], fill: float = 0.0
) -> torch.Tensor:
    """Return the rows of this rank's wanted interval of a full tensor, of which it has the shard `tensor`.

    `wanted`, the same on all ranks, may reach beyond the tensor on both sides, where `fill` stands.
    """
    if all(want == own for want, own in zip(wanted, shard.intervals(), strict=True)):
        return tensor
    fetched: torch.Tensor = _Fetch.apply(world, tensor, shard, tuple(wanted), fill)  # type: ignore[no-untyped-call]
    return fetched


def total(world: World, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks, on every rank."""
    summed: torch.Tensor = _Total.apply(world, tensor)  # type: ignore[no-untyped-call]
    return summed


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, world: World, tensor: torch.Tensor, shard: Shard, wanted: tuple[Interval, ...], fill: float
    ) -> torch.Tensor:
        ctx.world, ctx.shard, ctx.wanted, ctx.shape = world, shard, wanted, tensor.shape
        dim, size = shard.dim, shard.size
        begin, end = wanted[world.rank]
        own = shard.intervals()[world.rank]
        inside = [overlap(one, (0, size)) for one in wanted]
        parts = [_cut(tensor, dim, share, own[0]) for share in _shares(own, inside, world.rank)]
        taken = _shares(inside[world.rank], shard.intervals(), world.rank)
        received = _exchanged(world, parts, tensor, dim, taken) if any(halo_rows(shard, wanted)) else {}
        shape = list(tensor.shape)
        pieces = []
        if low := max(0, min(end, 0) - begin):
            shape[dim] = low
            pieces.append(tensor.new_full(shape, fill))
        for rank in range(shard.ranks):
            if rank == world.rank:
                pieces.append(_cut(tensor, dim, overlap(own, inside[rank]), own[0]))
            elif rank in received:
                pieces.append(received[rank])
        if high := max(0, end - max(begin, size)):
            shape[dim] = high
            pieces.append(tensor.new_full(shape, fill))
        return torch.cat(pieces, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        world, shard, wanted, shape = ctx.world, ctx.shard, ctx.wanted, ctx.shape
        (gradient,) = gradients
        dim, size = shard.dim, shard.size
        begin, _ = wanted[world.rank]
        own = shard.intervals()[world.rank]
        inside = [overlap(one, (0, size)) for one in wanted]
        shares = _shares(inside[world.rank], shard.intervals(), world.rank)
        parts = [_cut(gradient, dim, share, begin) for share in shares]
        given = _shares(own, inside, world.rank)
        received = _exchanged(world, parts, gradient, dim, given) if any(halo_rows(shard, wanted)) else {}
        mine = gradient.new_zeros(shape)
        a, b = overlap(own, inside[world.rank])
        if a < b:
            mine.narrow(dim, a - own[0], b - a).copy_(gradient.narrow(dim, a - begin, b - a))
        for rank, part in received.items():
            a, b = given[rank]
            mine.narrow(dim, a - own[0], b - a).add_(part)
        return None, mine, None, None, None


def _shares(mine: Interval, theirs: Sequence[Interval], rank: int) -> list[Interval]:
    """Return what of `mine` is each other rank's; nothing is this rank's own, which need not travel."""
    return [(mine[0], mine[0]) if r == rank else overlap(mine, one) for r, one in enumerate(theirs)]


def _cut(tensor: torch.Tensor, dim: int, rows: Interval, first: int) -> torch.Tensor:
    """Return rows of a tensor whose own first row has the number `first`."""
    begin, end = rows
    return tensor.narrow(dim, begin - first, end - begin) if begin < end else tensor.narrow(dim, 0, 0)


def _exchanged(
    world: World, parts: Sequence[torch.Tensor], like: torch.Tensor, dim: int, taken: Sequence[Interval]
) -> dict[int, torch.Tensor]:
    """Send `parts`, one for each rank, and receive rows `taken` of each rank; empty ones are left out."""
    shape = list(like.shape)
    others = math.prod(shape[:dim]) * math.prod(shape[dim:][1:])
    sent = torch.cat([part.reshape(-1) for part in parts])
    counts = [(end - begin) * others if begin < end else 0 for begin, end in taken]
    found = sent.new_empty(sum(counts))
    with comm.label(LABEL):
        world.all_to_all(found, sent, counts, [part.numel() for part in parts])
    received = {}
    for rank, (flat, (begin, end)) in enumerate(zip(torch.split(found, counts), taken, strict=True)):
        if begin < end:
            shape[dim] = end - begin
            received[rank] = flat.view(shape)
    return received


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, world: World, tensor: torch.Tensor) -> torch.Tensor:
        ctx.world, summed = world, world.summed(tensor)
        ctx.summed = summed.detach() if summed.ndim == 0 else None  # by which a loss is seen to count nothing
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, ctx.world.summed(gradients[0])
