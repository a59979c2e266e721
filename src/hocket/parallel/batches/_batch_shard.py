"""How a global batch is sharded: contiguous, in the order of ranks, the first ranks one sample more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hocket.sharding import strided_parts


@dataclass(frozen=True, slots=True)
class BatchShard:
    """One rank's part of a global batch."""

    begin: int  # the rank's first sample in the batch
    end: int  # one past the rank's last sample
    total: int  # samples of the whole batch
    world: int  # how many ranks share the batch

    @classmethod
    def of(cls, total: int, world: int, rank: int) -> BatchShard:
        """Return the part of `rank` in a batch of `total` samples."""
        each, rest = divmod(total, world)
        begin = rank * each + min(rank, rest)
        return cls(begin, begin + each + (rank < rest), total, world)

    @property
    def samples(self) -> int:
        """How many samples the rank has; zero if the batch has fewer than there are ranks."""
        return self.end - self.begin

    @property
    def uneven(self) -> int:
        """Samples of a batch that the ranks cannot share equally; 0 of one that they can."""
        return self.total if self.total % self.world else 0

    @property
    def weight(self) -> float:
        """By what a mean over the rank's samples counts in an average over ranks; 1.0 for equal parts.

        The mean over the batch is the average over ranks of weight times the rank's mean, and the weights of all ranks
        add up to their number.
        """
        return self.samples * self.world / self.total if self.samples * self.world != self.total else 1.0


def fingerprint(batch: Any) -> list[Any]:
    """Return what ranks compare to see whether they hold the same batch: sizes, plain values, sums of contents."""
    if isinstance(batch, torch.Tensor) and batch.layout is torch.jagged:
        return [item for one in strided_parts(batch) for item in fingerprint(one)]
    if isinstance(batch, torch.Tensor):
        content = batch.detach().reshape(-1)[:4096]
        content = (torch.view_as_real(content) if content.is_complex() else content).to("cpu", torch.float64)
        return [tuple(batch.shape), content.abs().sum().nan_to_num().item()]
    if isinstance(batch, np.ndarray):
        if batch.dtype.kind not in "biufc":
            return [batch.shape]
        first = np.abs(batch.flat[:4096])  # of any strides and order of bytes, which torch does not take
        return [batch.shape, float(np.nan_to_num(first.sum(dtype=np.float64)))]
    if isinstance(batch, Mapping):
        return [item for key, one in batch.items() for item in (str(key), *fingerprint(one))]
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return [item for value in batch for item in fingerprint(value)]
    return [batch] if isinstance(batch, str | bytes | int | float | None) else [type(batch).__name__]
