"""The collectives that compressors use, all asynchronous, with the bytes that each rank sends in them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hocket.comm import torch_adapter


class Link:
    """A group of ranks.

    Args:
        group: torch's.
        rank: this one's number in it.
        size: how many there are.

    Attributes:
        sent_nbytes: what a rank has sent so far, by bandwidth-optimal algorithms: 2 (n - 1) / n of the vector for an
            all_reduce, (n - 1) / n of it for the others.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.sent_nbytes = 0.0

    def all_reduce(self, tensor: torch.Tensor, operator: Any = dist.ReduceOp.SUM) -> Any:
        """Sums in place."""
        self._count(tensor, 2)
        return dist.all_reduce(tensor, op=operator, group=self.group, async_op=True)

    def reduce_scatter(self, mine: torch.Tensor, tensor: torch.Tensor) -> Any:
        """Sums; this rank's n-th of the sum goes to `mine`."""
        self._count(tensor, 1)
        return torch_adapter.reduce_scatter_single(mine, tensor, group=self.group, async_op=True)

    def all_gather(self, every: torch.Tensor, mine: torch.Tensor) -> Any:
        """Every rank's `mine`, by rank, in `every`, shape [n, ...]."""
        self._count(every, 1)
        return torch_adapter.all_gather_single(every.view(-1), mine.view(-1), group=self.group, async_op=True)

    def all_to_all(self, received: torch.Tensor, given: torch.Tensor) -> Any:
        """Row r of `given`, shape [n, ...], goes to rank r, and what rank r has for this one to row r of `received`."""
        self._count(given, 1)
        return dist.all_to_all_single(received.view(-1), given.view(-1), group=self.group, async_op=True)

    def _count(self, tensor: torch.Tensor, ways: int) -> None:
        self.sent_nbytes += ways * (self.size - 1) / self.size * tensor.numel() * tensor.element_size()
