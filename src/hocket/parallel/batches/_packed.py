"""Samples that a `collate_fn` packs: put one behind the other in one row, in which a model should tell them apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .trees import tensors_in


class Packed(NamedTuple):
    """A packed sample by itself, beside a batch in which it is the last one."""

    batch: Any  # of that sample alone; where the batch has no other, it twice
    whole: int  # how long the row of several is
    length: int  # how long that of the one is
    alone: bool  # whether `batch` is the sample alone


def packed_in(collate: Callable[[Any], Any], samples: Any, batch: Any) -> Packed | None:
    """Return a batch's last sample by itself, if the batch has all of them in one row; else None.

    Args:
        collate: Gives a batch of some samples, drawing no random numbers.
        samples: Those that the batch was made of, as they were.
        batch: All of them.
    """
    first, last = (collate(copy.deepcopy([one])) for one in (samples[0], samples[-1]))
    several = batch if len(samples) > 1 else collate(copy.deepcopy([*samples, *samples]))
    count = max(2, len(samples))
    for whole, begin, end in zip(*map(tensors_in, (several, first, last)), strict=False):
        dim = _along(whole, begin, end)
        if dim is None or end.shape[dim] < 2 or whole.shape[dim] == count or whole.shape[:1] == (count,):
            continue
        n, size = end.shape[dim], whole.shape[dim]
        if torch.equal(whole.narrow(dim, 0, begin.shape[dim]), begin) and torch.equal(
            whole.narrow(dim, size - n, n), end
        ):
            return Packed(last if len(samples) > 1 else several, size, n, len(samples) > 1)
    return None


def _along(whole: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> int | None:
    """Return the one dimension along which both may be parts of the whole; None if there is none."""
    if not whole.dim() == first.dim() == last.dim() or whole.layout is not torch.strided:
        return None
    dims = [i for i, n in enumerate(whole.shape) if n != first.shape[i] or n != last.shape[i]]
    if len(dims) != 1 or first.shape[dims[0]] + last.shape[dims[0]] > whole.shape[dims[0]]:
        return None
    return dims[0]
