"""All-reduce of sparse tensors: sums of what all ranks have, and an error for all where they differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hocket.comm import CollectiveMismatchError
from tests.comm.host_world import run

LAYOUTS = [[0, 0], [0, 1], [0, 0, 1]]


def _sparse(rank: int, *, dense_dims: int = 0, dtype: torch.dtype = torch.float64, entries: int = 4) -> torch.Tensor:
    """Entries of this rank's own places, some of them twice, as an embedding's gradient has them."""
    own = torch.Generator().manual_seed(rank)
    count = entries * rank  # rank 0 has none
    indices = torch.randint(0, 7, (2, count), generator=own)
    values = torch.randn(count, *[3] * dense_dims, generator=own, dtype=torch.float64).mul(8).round().to(dtype)
    return torch.sparse_coo_tensor(indices, values, (7, 7, *[3] * dense_dims), check_invariants=True)


def _sums() -> list[tuple[torch.Tensor, torch.Tensor]]:
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    for settings in ({}, {"dense_dims": 1}, {"dtype": torch.float32}, {"dtype": torch.int64}, {"entries": 0}):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            if op == dist.ReduceOp.AVG and settings.get("dtype") == torch.int64:
                continue
            tensor = _sparse(rank, **settings)
            dist.all_reduce(tensor, op=op)
            wanted = sum(_sparse(other, **settings).to_dense() for other in range(world))
            found.append((tensor.to_dense(), wanted / world if op == dist.ReduceOp.AVG else wanted))
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_entries_of_all_ranks_are_added_up(layout: list[int]) -> None:
    ranks = run(layout, _sums)
    for rank in ranks:
        for (got, wanted), (first, _) in zip(rank, ranks[0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)
            assert torch.equal(got, first)  # bit for bit what other ranks have


def _disagreements() -> list[str]:
    rank, said = dist.get_rank(), []
    for mine in (
        torch.zeros(7, 7 + rank).to_sparse_coo(),
        torch.zeros(7, 7, dtype=torch.float64 if rank else torch.float32).to_sparse_coo(),
        torch.zeros(7, 7).to_sparse_coo() if rank else torch.zeros(7, 7),
    ):
        with pytest.raises(CollectiveMismatchError) as caught:
            dist.all_reduce(mine)
        said.append(str(caught.value))
    after = torch.ones(2)
    dist.all_reduce(after)
    assert after.tolist() == [dist.get_world_size()] * 2
    return said


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_that_differ_are_told_who_has_what_and_the_group_goes_on(layout: list[int]) -> None:
    for shape, dtype, dense in run(layout, _disagreements):
        assert "rank 0: torch.float32 of shape (7, 7)" in shape
        assert "rank 1: torch.float32 of shape (7, 8)" in shape
        assert "rank 1: torch.float64 of shape (7, 7)" in dtype
        assert "all_reduce" in dense


def _refused() -> str:
    said: list[Any] = []
    for tensor, op in (
        (torch.eye(3).to_sparse_csr(), dist.ReduceOp.SUM),
        (torch.eye(3).to_sparse_coo(), dist.ReduceOp.MAX),
    ):
        with pytest.raises(ValueError, match="all_reduce") as caught:
            dist.all_reduce(tensor, op=op)
        said.append(caught.value)
    return "; ".join(map(str, said))


def test_what_cannot_be_added_up_is_refused_before_anything_is_posted() -> None:
    found = run([0, 0], _refused)[0]
    assert "convert it with to_sparse_coo()" in found
    assert "entries that are missing are 0" in found
