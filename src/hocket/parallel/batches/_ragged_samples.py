"""Samples of unlike lengths, which come in any batch: what a `collate_fn` pads then, and not in the first one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence, Sized
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch

from ._collated import Alone, place_of
from ._cut import Cutter
from .trees import children, tensors_in

_SHOWN, _TRIED = 4, 8
"""In how many batches padding is shown, and in how many it is looked for without any coming."""

_AT_ONCE = 8  # samples that are collated once more


class _Spare(NamedTuple):
    """Copies of some of a batch's samples, of which a `collate_fn` makes what it likes."""

    samples: list[Any]
    begin: int  # of them among the batch's
    total: int  # samples of the batch
    longer: bool = False  # whether the last one is of an earlier batch, and longer than the others are


class RaggedSamples:
    """Shows of some batches what samples of theirs are where others do not pad them, or where longer ones do.

    The longest sample that came is kept until that was seen: where a rank has one sample, or samples of one length,
    other ranks' are longer in the same batch.

    Args:
        on: Whether ranks have a part of each batch, which they pad.
    """

    def __init__(self, on: bool) -> None:
        self._shown, self._tried = 0, 0 if on else _TRIED
        self._longest: Any = None
        self._most = 0  # numbers of it

    @property
    def looks(self) -> bool:
        """Whether more is to be shown."""
        return self._shown < _SHOWN and self._tried < _TRIED

    def take(self, samples: Any) -> _Spare | None:
        """Return copies of samples that others of the batch, or an earlier one, are longer than; None if none are."""
        if not isinstance(samples, list) or not samples:
            return None
        sizes = [_sizes(one) for one in samples]
        totals = [sum(some) for some in sizes]
        place, most = max(range(len(samples)), key=totals.__getitem__), max(totals)
        try:
            if any(one != sizes[0] for one in sizes):
                before, after = (max(0, place - _AT_ONCE), place), (place + 1, min(len(samples), place + 1 + _AT_ONCE))
                begin, end = max(before, after, key=lambda span: span[1] - span[0])
                spare = _Spare(copy.deepcopy(samples[begin:end]), begin, len(samples))
            elif self._longest is not None and most < self._most:
                spare = _Spare(copy.deepcopy([samples[0], self._longest]), 0, len(samples), longer=True)
            else:
                spare = None
            if most > self._most:
                self._longest, self._most = copy.deepcopy(samples[place]), most
        except Exception:  # of samples that hold files, say
            self._tried = _TRIED
            return None
        return spare

    def alone(self, collate: Callable[[Any], Any], spare: _Spare | None, batch: Any) -> Alone | None:
        """Return some samples as they are without the batch's others, or beside a longer one; None if they are alike.

        Args:
            collate: Gives a batch, with the same random numbers in each call.
            spare: The samples.
            batch: All of them.
        """
        if spare is None:
            return None
        found = None
        try:
            if spare.longer:
                pair = collate(spare.samples)
                rows = any(one.shape[:1] == (2,) for one in tensors_in(pair))  # else both may be packed into one
                parts = (Cutter(2).cut(pair, i, i + 1, 2) for i in range(2 * rows))  # it may put the longer one first
                found = next((one for part in parts if (one := self._found(part, 1, spare, batch, 0))), None)
            else:
                size = len(spare.samples)
                found = self._found(collate(copy.deepcopy(spare.samples)), size, spare, batch, spare.begin)
                if found is None and size > 1:
                    totals = [sum(_sizes(one)) for one in spare.samples]
                    at = min(range(size), key=totals.__getitem__)
                    found = self._found(collate([spare.samples[at]]), 1, spare, batch, spare.begin + at)
        except Exception:  # of a function that takes no part of a batch
            found = None
        self._shown += found is not None
        self._tried += found is None
        if not self.looks:
            self._longest = None
        return found

    def _found(self, part: Any, size: int, spare: _Spare, batch: Any, begin: int) -> Alone | None:
        place = place_of(part, size, batch, spare.total, begin)
        return None if place is None else Alone(part, place, place + size)


def _sizes(sample: Any) -> tuple[int, ...]:
    """Return the sizes of what a sample holds: of tensors, arrays, texts and lists of numbers."""
    if isinstance(sample, torch.Tensor | np.ndarray):
        return tuple(sample.shape)
    if isinstance(sample, str | bytes):
        return (len(sample),)
    if isinstance(sample, Sequence) and sample and isinstance(sample[0], Number):
        return (len(sample),)
    if isinstance(sample, Mapping | Sequence) or hasattr(sample, "__dataclass_fields__"):
        return tuple(size for one in children(sample) for size in _sizes(one))
    return (len(sample),) if isinstance(sample, Sized) and not isinstance(sample, type) else ()
