"""Functions on parts: what they return is the part of what they return on the full tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hocket.sharding import CannotShard, Shard, as_local, cut, note, noted

from .memory_peers import Board, MemoryPeers

RANKS = 2
OTHER = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

# name: (shape, how it is cut, function)
CASES: dict[str, tuple[tuple[int, ...], Shard, Callable[[torch.Tensor], Any]]] = {
    "arithmetic": ((3, 8), Shard.even(1, (8,), 2), lambda x: (2 * x + x**2 - 1) / (1 + x.abs()).sqrt()),
    "in_place": ((3, 8), Shard.even(1, (8,), 2), lambda x: x.clone().relu_().mul_(3)),
    "broadcast_whole": ((3, 8, 4), Shard.even(1, (8,), 2), lambda x: OTHER * x + torch.ones(4)),
    "where": ((3, 8), Shard.even(1, (8,), 2), lambda x: torch.where(x > 0, x, torch.zeros(3, 1))),
    "mask": ((3, 8, 4), Shard.even(1, (8,), 2), lambda x: x.masked_fill(OTHER > 0, -1.0)),
    "types": ((3, 8), Shard.even(1, (8,), 2), lambda x: x.double().to(x.device).type_as(x).float().contiguous()),
    "view": ((3, 5, 24), Shard.even(2, (8, 8, 8), 2), lambda x: x.view(3, 5, 3, 4, 2)),
    "view_tuple": ((3, 5, 8), Shard.even(2, (8,), 2), lambda x: x.view((3, 5, 4, -1)).reshape(15, 8)),
    "view_size": ((3, 5, 8), Shard.even(2, (8,), 2), lambda x: x.view(*x.size()[:-1], 4, x.shape[-1] // 4)),
    "told_sizes": ((3, 5, 8), Shard.even(2, (8,), 2), lambda x: x * x.size(-1) + x.shape[2] + x.numel() + len(x)),
    "flatten": ((3, 4, 5, 2), Shard.even(1, (4,), 2), lambda x: torch.flatten(x, 1)),
    "unflatten": ((3, 8), Shard.even(1, (8,), 2), lambda x: x.unflatten(-1, (4, 2))),
    "squeeze": ((1, 3, 1, 8), Shard.even(3, (8,), 2), lambda x: x.squeeze(0).squeeze().unsqueeze(0).unsqueeze(-1)),
    "transpose": ((3, 8, 5), Shard.even(1, (8,), 2), lambda x: x.transpose(1, 2).swapaxes(0, 1)),
    "matrix": ((8, 5), Shard.even(0, (8,), 2), lambda x: x.t().T.mT),
    "permute": ((3, 8, 5), Shard.even(1, (8,), 2), lambda x: x.permute(2, 0, 1).permute((1, 2, 0))),
    "movedim": ((3, 8, 5), Shard.even(1, (8,), 2), lambda x: torch.movedim(x, 1, -1)),
    "expand": ((3, 8, 1, 2), Shard.even(1, (8,), 2), lambda x: x.expand(3, 8, 5, 2).expand(-1, -1, -1, 2)),
    "repeat": ((3, 8), Shard.even(1, (8,), 2), lambda x: x.repeat(2, 1)),
    "interleave": ((3, 4, 2), Shard.even(1, (4,), 2), lambda x: x.repeat_interleave(2, dim=1)),
    "split": ((3, 24), Shard.even(1, (16, 8), 2), lambda x: x.split([16, 8], dim=1)),
    "split_equal": ((3, 24), Shard.even(1, (8, 8, 8), 2), lambda x: torch.split(x, 8, dim=-1)),
    "chunk": ((3, 24), Shard.even(1, (8, 8, 8), 2), lambda x: x.chunk(3, dim=-1)),
    "split_other": ((6, 8), Shard.even(1, (8,), 2), lambda x: x.split(4)),
    "unbind": ((3, 8, 2), Shard.even(1, (8,), 2), lambda x: x.unbind(0)),
    "index": ((3, 8, 5), Shard.even(1, (8,), 2), lambda x: x[0, :, None, 1:3]),
    "chosen": ((3, 8, 5), Shard.even(1, (8,), 2), lambda x: x[torch.tensor([[0, 2]])] + x[torch.ones(3) > 0][:1]),
    "chosen_behind": ((3, 8, 5), Shard.even(1, (8,), 2), lambda x: x[..., torch.tensor([4, 1, 1])]),
    "every_second": ((3, 24), Shard.even(1, (24,), 2), lambda x: x[..., ::2] * x[:, 1::2]),
    "cat_nothing": ((3, 8, 5), Shard.even(1, (8,), 2), lambda x: torch.cat([torch.tensor([]), x], -2 + 1)),
    "ellipsis": ((3, 24), Shard.even(1, (8, 16), 2), lambda x: x[..., 8:]),
    "select": ((3, 8, 5), Shard.even(1, (8,), 2), lambda x: x.select(0, 1)),
    "cat_other": ((3, 8, 5), Shard.even(1, (8,), 2), lambda x: torch.cat([x, -x], dim=2)),
    "cat_along": ((3, 8, 5), Shard.even(1, (8,), 2), lambda x: torch.cat([x, x * 2], 1)),
    "cat_whole": ((3, 8), Shard.even(1, (8,), 2), lambda x: torch.cat([x, torch.zeros(3, 4)], -1)),
    "stack": ((3, 8), Shard.even(1, (8,), 2), lambda x: torch.stack([x, x], dim=1)),
    "softmax": ((3, 8, 5), Shard.even(1, (8,), 2), lambda x: F.softmax(x, dim=-1).log_softmax(0)),
    "mean": ((3, 8, 5), Shard.even(1, (8,), 2), lambda x: x.mean(-1) + x.sum(dim=2) + x.amax(2, keepdim=True)[..., 0]),
    "max": ((3, 8, 5), Shard.even(1, (8,), 2), lambda x: x.max(dim=2)),
    "matmul_batch": ((3, 8, 5, 2), Shard.even(1, (8,), 2), lambda x: x @ x.transpose(-2, -1)),
    "matmul_rows": ((3, 8, 5), Shard.even(1, (8,), 2), lambda x: x @ torch.ones(5, 2)),
    "matmul_columns": ((3, 5, 8), Shard.even(2, (8,), 2), lambda x: torch.ones(4, 5) @ x),
    "einsum": (
        (3, 8, 5),
        Shard.even(1, (8,), 2),
        lambda x: torch.einsum("bhd,hd->bh", x, torch.arange(40.0).view(8, 5)),
    ),
    "attention": (
        (3, 8, 5, 2),
        Shard.even(1, (8,), 2),
        lambda x: F.scaled_dot_product_attention(x, 2 * x, x - 1, is_causal=True),
    ),
    "attention_mask": (
        (3, 8, 4, 2),
        Shard.even(1, (8,), 2),
        lambda x: F.scaled_dot_product_attention(x, x, x, torch.arange(128.0).view(1, 8, 4, 4).sin()),
    ),
    "glu": ((3, 16), Shard.even(1, (8, 8), 2), lambda x: F.glu(x, -1)),
    "pool": ((2, 8, 4, 4), Shard.even(1, (8,), 2), lambda x: F.avg_pool2d(F.max_pool2d(x, 2), 2)),
    "adaptive_pool": ((2, 8, 4, 4), Shard.even(1, (8,), 2), lambda x: F.adaptive_avg_pool2d(x, 1)),
    "interpolate": ((2, 8, 4, 4), Shard.even(1, (8,), 2), lambda x: F.interpolate(x, scale_factor=2, mode="nearest")),
    "pad": ((2, 8, 4, 4), Shard.even(1, (8,), 2), lambda x: F.pad(x, [1, 0, 0, 1])),
    "pixel_shuffle": ((2, 16, 2, 2), Shard.even(1, (16,), 2), lambda x: F.pixel_shuffle(x, 2)),
    "dropout_off": ((3, 8), Shard.even(1, (8,), 2), lambda x: F.dropout(x, 0.5, training=False)),
    "triangle": ((3, 8, 5, 5), Shard.even(1, (8,), 2), lambda x: x.tril()),
}


def run_on_part(full: torch.Tensor, split: Shard, rank: int, function: Callable[[torch.Tensor], Any]) -> Any:
    peers = MemoryPeers(Board(RANKS), rank, RANKS, False)
    return function(note(cut(full, split, rank).clone(), split, peers))


@pytest.mark.parametrize("name", CASES)
def test_the_result_on_a_part_is_the_part_of_the_result(name: str) -> None:
    shape, split, function = CASES[name]
    full = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = function(full)
    for rank in range(RANKS):
        found = run_on_part(full, split, rank, function)
        pairs = [(found, expected)] if isinstance(expected, torch.Tensor) else list(zip(found, expected, strict=True))
        for mine, whole in pairs:
            made = noted(mine)
            assert made is not None
            with as_local():
                torch.testing.assert_close(mine, cut(whole, made, rank))


@pytest.mark.parametrize(
    ("shape", "split", "function", "why"),
    [
        ((3, 8), Shard.even(1, (8,), 2), lambda x: x.softmax(-1), "along the dim that is divided"),
        ((3, 8), Shard.even(1, (8,), 2), lambda x: x.sum(), "adds up along the dim"),
        ((3, 8), Shard.even(1, (8,), 2), lambda x: x @ torch.ones(8, 2), "adds up along the dim"),
        ((3, 8), Shard.even(1, (8,), 2), lambda x: x[:, 3], "single elements"),
        ((3, 8), Shard.even(1, (8,), 2), lambda x: x[:, :3], "takes 0:3"),
        ((3, 8), Shard.even(1, (8,), 2), lambda x: x[:, torch.tensor([0])], "single elements"),
        ((3, 8), Shard.even(1, (8,), 2), lambda x: x.split([2, 6], 1), "pieces of"),
        ((3, 6), Shard.even(1, (6,), 2), lambda x: x.view(3, 3, 2), "cannot stay divided"),
        ((3, 8), Shard.even(1, (8,), 2), lambda x: torch.trapezoid(x), "trapezoid"),
        ((2, 8, 4), Shard.even(1, (8,), 2), lambda x: F.avg_pool2d(x, 2), "along the dim that is divided"),
        (
            (3, 8),
            Shard.even(1, (8,), 2),
            lambda x: x + note(torch.ones(3, 8), Shard.even(0, (6,), 2), MemoryPeers(Board(2), 0, 2, False)),
            "divided differently",
        ),
    ],
)
def test_what_needs_other_ranks_parts_is_refused(
    shape: tuple[int, ...], split: Shard, function: Callable[[torch.Tensor], Any], why: str
) -> None:
    with pytest.raises(CannotShard, match=why):
        run_on_part(torch.randn(shape), split, 0, function)
