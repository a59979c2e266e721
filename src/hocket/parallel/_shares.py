"""How a global batch is shared out: contiguous, in the order of ranks, the first ranks one sample more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import _trees


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a global batch.

    Attributes:
        begin: its first sample in the batch.
        end: one past its last.
        total: samples of the whole batch.
        world: how many ranks share the batch.
    """

    begin: int
    end: int
    total: int
    world: int

    @classmethod
    def of(cls, total: int, world: int, rank: int) -> Share:
        """The part of `rank` in a batch of `total` samples."""
        each, rest = divmod(total, world)
        begin = rank * each + min(rank, rest)
        return cls(begin, begin + each + (rank < rest), total, world)

    @property
    def samples(self) -> int:
        """How many samples the rank has; zero if the batch has fewer than there are ranks."""
        return self.end - self.begin

    @property
    def weight(self) -> float:
        """By what a mean over the rank's samples counts in an average over ranks; 1.0 for equal parts.

        The mean over the batch is the average over ranks of weight times the rank's mean, and the weights of all ranks
        add up to their number.
        """
        return self.samples * self.world / self.total if self.samples * self.world != self.total else 1.0


def batch_size(batch: Any) -> int:
    """Samples in a batch: the length of the first axis of the first tensor or array in it.

    Raises:
        TypeError: there is none, so the batch cannot be cut.
    """
    size = _first_axis(batch)
    if size is None:
        raise TypeError(
            f"cannot share out a batch of type {type(batch).__name__}: it holds no tensor or array with a first axis "
            "in tuples, lists or mappings. Pass hocket.distribute a torch DataLoader over a map-style data set, or "
            "batches made of those"
        )
    return size


def cut(batch: Any, begin: int, end: int) -> Any:
    """Samples `begin` to `end` of a batch.

    Whatever has the length of the batch along its first axis is cut: tensors, arrays, and lists of plain values. All
    else (a scalar, a table of class weights) belongs to the batch as a whole and stays.
    """
    return _cut(batch, begin, end, batch_size(batch))


def _first_axis(value: Any) -> int | None:
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.shape[0]) if value.ndim else None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        for item in value:
            size = _first_axis(item)
            if size is not None:
                return size
    return None


def _cut(value: Any, begin: int, end: int, total: int) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value[begin:end] if value.ndim and value.shape[0] == total else value
    if isinstance(value, Mapping):
        return _trees.like_mapping(value, {key: _cut(item, begin, end, total) for key, item in value.items()})
    if isinstance(value, tuple | list):
        if _first_axis(value) is None:  # plain values: one for each sample, or something else
            return value[begin:end] if len(value) == total else value
        return _trees.like_sequence(value, [_cut(item, begin, end, total) for item in value])
    return value


def fingerprint(batch: Any) -> list[Any]:
    """What two ranks can compare to see whether they hold the same batch: sizes, plain values, and sums of contents."""
    if isinstance(batch, torch.Tensor):
        content = batch.detach().reshape(-1)[:4096]
        content = (torch.view_as_real(content) if content.is_complex() else content).to("cpu", torch.float64)
        return [tuple(batch.shape), content.abs().sum().nan_to_num().item()]
    if isinstance(batch, np.ndarray):
        return fingerprint(torch.from_numpy(batch)) if batch.dtype.kind in "biufc" else [batch.shape]
    if isinstance(batch, Mapping):
        return [item for key in batch for item in (str(key), *fingerprint(batch[key]))]
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return [item for value in batch for item in fingerprint(value)]
    return [batch] if isinstance(batch, str | bytes | int | float | None) else [type(batch).__name__]
