"""Ranks as threads of one process that see each other's tensors, so that autograd goes through all of them at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from hocket.sharding import Interval, Shard, as_local, join

DEADLINE_S = 60


class Board:
    """Where ranks leave tensors for each other."""

    def __init__(self, ranks: int) -> None:
        self.tensors: list[Any] = [None] * ranks
        self.barrier = threading.Barrier(ranks)


class MemoryPeers:
    """One rank of a board; see `hocket.sharding.ShardPeers`."""

    def __init__(self, board: Board, rank: int, size: int, exchanges: bool) -> None:
        self._board, self.rank, self.size, self.exchanges, self.gathers = board, rank, size, exchanges, exchanges
        self.heard: Callable[[str, Any, str, str], None] | None = None

    def all(self, tensor: Any) -> list[Any]:
        self._board.tensors[self.rank] = tensor.clone()  # which its rank may write to before others have read it
        self._board.barrier.wait(DEADLINE_S)
        found = list(self._board.tensors)
        self._board.barrier.wait(DEADLINE_S)
        return found

    def fetch(self, tensor: torch.Tensor, shard: Shard, wanted: Sequence[Interval], fill: float) -> torch.Tensor:
        with as_local():
            full = join(self.all(tensor), shard)
            begin, end = wanted[self.rank]
            low, high = max(0, min(end, 0) - begin), max(0, end - max(begin, shard.size))
            inside = full.narrow(shard.dim, *_inside(begin, end, shard.size))
            shape = list(inside.shape)
            shape[shard.dim] = low
            before = inside.new_full(shape, fill)
            shape[shard.dim] = high
            return torch.cat([before, inside, inside.new_full(shape, fill)], shard.dim)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        with as_local():
            return torch.stack(self.all(tensor)).sum(0, dtype=tensor.dtype)

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @contextmanager
    def own_random_numbers(self, device: torch.device) -> Iterator[None]:
        with nullcontext():
            yield

    def batch_norm(self, input: torch.Tensor, divided: bool, weight: Any, bias: Any, eps: float) -> Any:
        if not divided:
            return None
        axes = [0, *range(2, input.ndim)]
        shape = [1, -1, *[1] * (input.ndim - 2)]
        total = self.total(torch.tensor(float(input.numel() // input.shape[1]), dtype=input.dtype))
        mean = self.total(input.sum(axes)) / total
        variance = self.total((input - mean.view(shape)).square().sum(axes)) / total
        out = (input - mean.view(shape)) * torch.rsqrt(variance + eps).view(shape)
        if weight is not None:
            out = out * weight.view(shape)
        return out if bias is None else out + bias.view(shape), mean, variance, total


def _inside(begin: int, end: int, size: int) -> tuple[int, int]:
    begin, end = max(0, min(begin, size)), max(0, min(end, size))
    return begin, max(0, end - begin)


def in_ranks(ranks: int, exchanges: bool, run: Callable[[MemoryPeers], Any]) -> list[Any]:
    """What `run` returns on each rank; raises what the first rank raised that was not interrupted by another."""
    board = Board(ranks)
    found: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            found[rank] = run(MemoryPeers(board, rank, ranks, exchanges))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            board.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    if errors:
        raise errors[0]
    return found
