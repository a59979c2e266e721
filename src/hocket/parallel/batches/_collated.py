"""What a loader's first batch shows of its `collate_fn`: whether a sample is in it as it is without the others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ._packed import Packed, packed_in
from .trees import children, mapped, tensors_in

_SAMPLES = 8
"""Most samples that are collated once more."""


class Alone(NamedTuple):
    """Some samples of a batch as they are without the others: these padded them to another length."""

    batch: Any
    begin: int  # of the samples, among those of the batch
    end: int
    length: int = 0  # to which the program has padded a list of samples; ranks that have the same pad to one length


class Shown(NamedTuple):
    """A batch, and what was seen as it was made; a plain tuple, so that it can be pinned."""

    batch: Any
    mixed: bool | None = False  # whether samples of the batch have others of it in them; None where that was not asked
    alone: Alone | None = None
    packed: Packed | None = None


def look_at_collating(collate: Callable[[Any], tuple[Any, bool]], samples: Any) -> Shown:
    """Make a batch of samples, and look at what its parts would have been.

    Where random numbers are drawn, the first sample must stay as it is while others change places, or while one beside
    it is scaled if there are no more; else some of the samples must be what they are in the batch, in any order, or are
    padded otherwise. Fields that have no row for each sample, numbers of rows (indices, classes) and what the program
    has packed are left alone.

    Args:
        collate: Gives a batch, and whether random numbers were drawn; the same ones in each call.
        samples: What it is made of.
    """
    count = len(samples) if isinstance(samples, list) else 0
    try:
        again = copy.deepcopy(samples) if count else []
    except Exception:  # of samples that hold files, say
        again = []
    batch, drew = collate(samples)
    if not again:
        return Shown(batch)
    rows = _rows(batch, count)
    try:
        if drew:
            others: list[Any] = [again[0], *again[2:], *again[1:2]]
            if count <= 2:  # there is no other to change places with
                rows = _rows(collate([copy.deepcopy(again[0]), _scaled(again[-1], 0.5)])[0], 2)
                others, count = [again[0], _scaled(again[-1], 0.25)], 2
            theirs = _rows(collate(others)[0], count)
            pairs = [(mine[:1], other[:1]) for mine, other in _pairs(rows, theirs)]
            return Shown(batch, any(one.shape == other.shape and not _equal(one, other) for one, other in pairs))
        if count == 1 or not any(one is not None for one in rows):
            return Shown(batch, packed=packed_in(lambda some: collate(some)[0], again, batch))
        end = min(count, _SAMPLES)
        halves = [(0, end // 2), (end // 2, end)]
        for a, b in (*halves, *((i, i + 2) for i in range(end - 1)), *((i, i + 1) for i in range(end))):
            part, _ = collate(copy.deepcopy(again[a:b]))
            if (begin := place_of(part, b - a, batch, count, a)) is not None:
                return Shown(batch, alone=Alone(part, begin, begin + b - a))
            for mine, other in _pairs(rows, _rows(part, b - a)):
                if mine.shape[1:] != other.shape[1:]:
                    continue
                if not _equal(mine[a:b], other) and not all(any(map(_equal, mine, [row] * count)) for row in other):
                    return Shown(batch, mixed=True)
            if not any(_pairs(rows, _rows(part, b - a))):
                break
        return Shown(batch)
    except Exception:  # of a function that takes no part of a batch
        return Shown(batch)


def place_of(part: Any, size: int, batch: Any, count: int, begin: int = 0) -> int | None:
    """Return where in a batch some of its samples begin that are padded otherwise there; None where that is not so.

    They are what they are in the batch but for what is beyond them, at the beginning or the end. One sample may have
    another place than it was given.

    Args:
        part: The samples, collated without the others, or beside longer ones.
        size: How many they are.
        batch: All of them.
        count: How many the batch has.
        begin: Where they were given.
    """
    pairs = _pairs(_rows(batch, count), _rows(part, size))
    if all(mine.shape[1:] == other.shape[1:] for mine, other in pairs):
        return None
    places: list[int] = [begin, *(range(count) if size == 1 else ())]
    for place in places:
        rows = [(mine[place : place + size], other) for mine, other in pairs]
        if any(all(_equal(*_common(*row, end=end)) for row in rows) for end in (False, True)):
            return place
    return None


def _common(one: torch.Tensor, other: torch.Tensor, *, end: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what two tensors have in common: their ends, or else their beginnings."""
    for dim, sizes in enumerate(zip(one.shape, other.shape, strict=True)):
        n = min(sizes)
        one = one.narrow(dim, one.shape[dim] - n if end else 0, n)
        other = other.narrow(dim, other.shape[dim] - n if end else 0, n)
    return one, other


def alone_like(given: Any, held: Sequence[torch.Tensor | None], alone: Alone | None) -> Alone | None:
    """Return what a program has made of a batch, of some of its samples alone.

    None where it is not made of the batch's tensors as they are, on whatever device, or where it is not sure of which.

    Args:
        given: A structure of tensors.
        held: The tensors of the batch.
        alone: Some of its samples.
    """
    theirs = [] if alone is None else [one for one in tensors_in(alone.batch) if one.numel()]
    if alone is None or len(theirs) != len(held):
        return None

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        alike = [
            (one, other)
            for one, other in zip(held, theirs, strict=True)
            if one is not None and one.shape == tensor.shape and torch.equal(one.to(tensor), tensor)
        ]
        # Labels are the inputs where nothing is padded, but not beside a longer sample.
        own = [other for one, other in alike if one is tensor] or [other for _, other in alike]
        if any(one.shape != own[0].shape or not torch.equal(one.to(own[0]), own[0]) for one in own[1:]):
            raise LookupError
        if tensor.dim() and not own:
            raise LookupError
        return own[0].to(tensor) if own else tensor

    try:
        return Alone(mapped(given, changed), alone.begin, alone.end)
    except LookupError:
        return None


def lengths_in(batch: Any, samples: int) -> tuple[int, ...]:
    """Return the lengths of a batch's samples where it has them in a list, and they differ; else ()."""
    inner = children(batch)
    if isinstance(batch, tuple | list) and len(inner) == samples:
        for field in zip(*map(tensors_in, inner), strict=False):
            lengths = tuple(len(one) if one.dim() else 0 for one in field)
            if len({*lengths}) > 1:
                return lengths
    return next((found for one in inner if (found := lengths_in(one, samples))), ())


def shortest_alone(given: Any, lengths: Sequence[int]) -> Alone | None:
    """Return the shortest sample of those that a program has padded to the longest, as it is without the others.

    None where no tensor shows that it has done so: what is beyond a sample's length is one number.
    """
    count, longest = len(lengths), max(lengths, default=0)
    rows = [one for one in tensors_in(given) if one.shape[:1] == (count,) and longest in one.shape[1:2]]
    shortest = min(range(count), key=lengths.__getitem__, default=0)

    def padding(one: torch.Tensor, *, end: bool) -> bool:
        beyond = [row[n:] if end else row[: longest - n] for row, n in zip(one, lengths, strict=True)]
        values = torch.cat([part.reshape(-1) for part in beyond])
        return bool((values == values[:1]).all()) and values.numel() > 0

    end = any(padding(one, end=True) for one in rows)
    if not lengths or not (end or any(padding(one, end=False) for one in rows)):
        return None

    def cropped(one: torch.Tensor) -> torch.Tensor:
        if one.shape[:1] != (count,):
            return one
        row, n = one[shortest : shortest + 1], lengths[shortest]
        for dim in (dim for dim, size in enumerate(one.shape) if dim and size == longest):
            row = row.narrow(dim, 0 if end else longest - n, n)
        return row.clone()

    return Alone(mapped(given, cropped), shortest, shortest + 1, longest)


def _scaled(sample: Any, factor: float) -> Any:
    """Return a sample with smaller numbers, and its images of whole ones; labels and tokens stay as they are."""

    def scaled(one: torch.Tensor) -> torch.Tensor:
        image = one.dim() > 1 and one.dtype != torch.bool
        return (factor * one).to(one.dtype) if image or one.is_floating_point() or one.is_complex() else one.clone()

    return mapped(sample, scaled)


def _rows(batch: Any, count: int) -> list[torch.Tensor | None]:
    """Return the tensors of a batch; None for those that have no row, or a whole number alone, for each sample."""
    return [
        one.detach() if one.dim() and len(one) == count and (one.dim() > 1 or one.is_floating_point()) else None
        for one in tensors_in(batch)
    ]


def _pairs(
    some: list[torch.Tensor | None], others: list[torch.Tensor | None]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if len(some) != len(others):
        return []
    found = zip(some, others, strict=True)
    return [(a, b) for a, b in found if a is not None and b is not None and a.dim() == b.dim()]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    kind = torch.complex128 if one.is_complex() else torch.float64
    return torch.allclose(one.to(kind), other.to(kind), rtol=1e-5, equal_nan=True)
