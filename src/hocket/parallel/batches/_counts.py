"""Counts that tensors of a batch give: labels that are not ignored, and sums of masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_IGNORED = (-100, -1, 0)
"""What marks a label that a loss leaves out: torch's own, and what programs pad with."""


@dataclass(frozen=True, slots=True)
class TensorCount:
    """Counts entries of one tensor of a batch."""

    path: tuple[Any, ...]  # keys and positions that lead to it
    ignored: int | None  # the label that is not counted; None for the sum of a mask
    shifted: bool  # whether the first entry of each sample is left out, as a model that predicts the next one does

    def __call__(self, batch: Any) -> float:
        """Return the count of a batch, or of a part of one."""
        value = batch
        for key in self.path:
            value = value[key]
        value = value[:, 1:] if self.shifted else value
        return float(value.double().sum() if self.ignored is None else (value != self.ignored).sum())

    def __str__(self) -> str:
        name = "batch" + "".join(f"[{key!r}]" for key in self.path) + ("[:, 1:]" if self.shifted else "")
        return f"{name}.sum()" if self.ignored is None else f"({name} != {self.ignored}).sum()"


@dataclass(frozen=True, slots=True)
class AgreedCount:
    """The count of several tensors that have been found to give the same one; not a number once they do not."""

    counts: tuple[TensorCount, ...]  # of each, at least one

    @classmethod
    def of(cls, counts: Sequence[TensorCount]) -> AgreedCount:
        """Return the count that these agree on.

        A program marks what it leaves out in one way. Where that is torch's -100, zeros of another tensor (tokens that
        padding has) agree by chance: a real token of that number is no reason to stop.
        """
        marked = any(one.ignored == _IGNORED[0] for one in counts)
        return cls(tuple(one for one in counts if not marked or one.ignored in (_IGNORED[0], None)))

    def __call__(self, batch: Any) -> float:
        """Return the count of a batch, or of a part of one."""
        found = [count(batch) for count in self.counts]
        return found[0] if all(one == found[0] for one in found) else float("nan")

    def __str__(self) -> str:
        return str(self.counts[0])


def possible_counts(batch: Any, samples: int, path: tuple[Any, ...] = ()) -> Iterator[TensorCount]:
    """Yield the counts that the tensors of a batch of so many samples can give."""
    if isinstance(batch, torch.Tensor):
        if not batch.dim() or len(batch) != samples or batch.is_complex():
            return
        for shifted in (False, True)[: 1 + (batch.dim() > 1 and batch.shape[1:2] > (1,))]:
            if batch.dtype != torch.bool and not batch.is_floating_point():
                yield from (TensorCount(path, one, shifted) for one in _IGNORED if bool((batch == one).any()))
            if bool((batch >= 0).all()) and bool((batch <= 1).all() or batch.is_floating_point()):
                yield TensorCount(path, None, shifted)
        return
    entries = (
        batch.items() if isinstance(batch, Mapping) else enumerate(batch if isinstance(batch, tuple | list) else ())
    )
    for key, item in entries:
        yield from possible_counts(item, samples, (*path, key))
