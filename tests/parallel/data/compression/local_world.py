"""Ranks of one process: their exchanges are advanced in step, and their collectives carried out here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hocket.parallel.data.compression import (
    BucketJob,
    BucketMemory,
    Compressor,
    CountingGroup,
    Matrix,
)


class LocalLink(CountingGroup):
    """Notes what is asked of it, until all ranks have."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None, rank, size)
        self.asked: tuple[Any, ...] = ()
        self.announced: list[tuple[str, int]] = []

    def all_reduce(self, tensor: torch.Tensor, operator: Any = dist.ReduceOp.SUM) -> Any:
        return self._ask("all_reduce", tensor, tensor, tensor)

    def reduce_scatter(self, mine: torch.Tensor, tensor: torch.Tensor) -> Any:
        return self._ask("reduce_scatter", tensor, tensor, mine)

    def all_gather(self, every: torch.Tensor, mine: torch.Tensor) -> Any:
        return self._ask("all_gather", every, mine, every)

    def all_to_all(self, received: torch.Tensor, given: torch.Tensor) -> Any:
        return self._ask("all_to_all", given, given, received)

    def _ask(self, kind: str, counted: torch.Tensor, given: torch.Tensor, out: torch.Tensor) -> Any:
        self.announced.append((kind, counted.numel() * counted.element_size()))
        self.asked = (kind, given.clone(), out)
        return self


def _carry_out(links: Sequence[LocalLink]) -> None:
    given = [link.asked[1].reshape(-1) for link in links]
    n = len(links)
    for rank, link in enumerate(links):
        kind, _, out = link.asked
        if kind in ("all_reduce", "reduce_scatter"):
            total = torch.stack(given).sum(0, dtype=given[0].dtype)
            found = total if kind == "all_reduce" else total.view(n, -1)[rank]
        elif kind == "all_gather":
            found = torch.cat(given)
        else:
            found = torch.cat([each.view(n, -1)[rank] for each in given])
        out.copy_(found.view_as(out))


class LocalWorld:
    """Some ranks with one bucket each, that are averaged again and again.

    Args:
        method: the compressor.
        n: ranks.
        shapes: of the gradients in the bucket.
        dtype: of them.
        scattered: whether each rank needs its part only.
    """

    def __init__(
        self,
        method: Compressor,
        n: int,
        shapes: Sequence[tuple[int, int]],
        dtype: torch.dtype = torch.float32,
        *,
        scattered: bool = False,
        seed: int = 0,
    ) -> None:
        self.method, self.n, self.scattered = method, n, scattered
        numel = sum(rows * columns for rows, columns in shapes)
        padded = -(-numel // n) * n if scattered else numel
        matrices, begin = [], 0
        for rows, columns in shapes:
            matrices.append(Matrix(begin, rows, columns))
            begin += rows * columns
        self.numel = numel
        self.jobs = []
        for rank in range(n):
            flat = torch.zeros(padded, dtype=dtype)
            self.jobs.append(
                BucketJob(
                    flat=flat,
                    out=flat.view(n, -1)[rank] if scattered else flat,
                    scattered=scattered,
                    matrices=matrices,
                    gaps=torch.arange(numel, padded),
                    link=LocalLink(rank, n),
                    memory=BucketMemory(),
                    generator=torch.Generator().manual_seed(seed + rank),
                )
            )

    def average(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What each rank gets for these gradients, each of shape [numel]."""
        exchanges = []
        for job, gradient in zip(self.jobs, gradients, strict=True):
            job.flat.zero_()
            job.flat[: self.numel] = gradient
            job.link.announced.clear()  # type: ignore[attr-defined]
            exchanges.append(self.method.exchange(job))
        while True:
            works = [next(exchange, None) for exchange in exchanges]
            if works[0] is None:
                assert not any(works)
                break
            _carry_out([job.link for job in self.jobs])  # type: ignore[misc]
        if self.scattered:
            whole = torch.cat([job.out for job in self.jobs])
            return [whole[: self.numel].clone()] * self.n
        return [job.out[: self.numel].clone() for job in self.jobs]

    def residuals(self) -> list[torch.Tensor]:
        """What each rank keeps for later."""
        found = []
        for job in self.jobs:
            residual = self.method.residual(job)
            assert residual is not None
            found.append(residual[: self.numel])
        return found

    def announced(self) -> list[tuple[str, int]]:
        """Kinds and bytes of the operations of the last average."""
        links: list[Any] = [job.link for job in self.jobs]
        assert all(link.announced == links[0].announced for link in links)
        return list(links[0].announced)
