"""Cutting, joining and viewing of parts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.sharding import CannotShard, Shard, cut, join, reshaped


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape)


@settings(deadline=None, max_examples=50)
@given(st.sampled_from([2, 3]), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 2))
def test_joining_parts_gives_the_full_tensor(ranks: int, units: list[int], dim: int) -> None:
    split = Shard.even(dim, tuple(ranks * unit for unit in units), ranks)
    shape = [2, 2, 2]
    shape[dim] = split.size
    full = numbered(tuple(shape))
    assert torch.equal(join([cut(full, split, r) for r in range(ranks)], split), full)


def test_every_rank_has_its_part_of_each_segment() -> None:
    assert Shard.even(0, (4, 2), 2).ranges(1) == [(2, 4), (5, 6)]
    assert cut(torch.arange(6), Shard.even(0, (4, 2), 2), 1).tolist() == [2, 3, 5]


FACTORS = {24: [(24,), (4, 6), (2, 12), (2, 3, 4), (6, 4), (3, 8), (2, 2, 6), (1, 24), (12, 2)], 2: [(2,), (2, 1)]}


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(FACTORS[2]),
    st.sampled_from(FACTORS[24]),
    st.sampled_from(
        [(2, 24), (48,), (2, 4, 6), (8, 6), (2, 2, 12), (4, 12), (2, 3, 8), (6, 8), (2, 3, 2, 4), (2, 24, 1)]
    ),
    st.sampled_from([1, 2, 3]),
    st.data(),
)
def test_a_view_of_a_part_is_the_part_of_the_view(
    head: tuple[int, ...], tail: tuple[int, ...], new: tuple[int, ...], segments: int, data: st.DataObject
) -> None:
    old = (*head, *tail)
    dim = data.draw(st.integers(0, len(old) - 1))
    if old[dim] % (segments * 2):
        return
    split = Shard.even(dim, (old[dim] // segments,) * segments, 2)
    try:
        moved = reshaped(split, old, new)
    except CannotShard:
        return
    local = [s // 2 if d == moved.dim else s for d, s in enumerate(new)]
    full = numbered(old)
    for rank in range(2):
        assert torch.equal(cut(full, split, rank).reshape(local), cut(full.view(new), moved, rank))


@pytest.mark.parametrize(
    ("split", "old", "new", "expected"),
    [
        (Shard.even(2, (32,), 2), (3, 5, 32), (3, 5, 4, 8), Shard.even(2, (4,), 2)),
        (Shard.even(2, (4,), 2), (3, 5, 4, 8), (3, 5, 32), Shard.even(2, (32,), 2)),
        (Shard.even(2, (32, 32, 32), 2), (3, 5, 96), (3, 5, 3, 4, 8), Shard.even(3, (4,), 2)),
        (Shard.even(3, (4,), 2), (3, 5, 3, 4, 8), (3, 5, 96), Shard.even(2, (32, 32, 32), 2)),
        (Shard.even(1, (4, 2), 2), (3, 6, 7), (3, 42), Shard.even(1, (28, 14), 2)),
        (Shard.even(2, (32,), 2), (3, 5, 32), (15, 32), Shard.even(1, (32,), 2)),
    ],
)
def test_views_that_models_make(split: Shard, old: tuple[int, ...], new: tuple[int, ...], expected: Shard) -> None:
    assert reshaped(split, old, new) == expected


def test_a_view_that_needs_segments_says_which() -> None:
    with pytest.raises(CannotShard, match="cannot stay divided among 2") as caught:
        reshaped(Shard.even(2, (96,), 2), (3, 5, 96), (3, 5, 3, 4, 8))
    assert caught.value.segments == ((32, 32, 32), (8,) * 12)
