"""Where what a rank holds lies in the user's own model: names, full shapes, and boxes in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A box of a tensor of the model that this rank holds."""

    name: str  # the tensor's name in the model
    shape: Shape  # shape of the whole tensor
    offsets: Shape  # offsets of the box in the whole tensor
    tensor: torch.Tensor  # the box's values; changing them changes what the rank holds


class DimSegment(NamedTuple):
    """Indices of a rank's tensor along one axis, and where they lie in the model's."""

    begin: int  # first index, in the rank's tensor
    end: int  # one past the last index
    at: int  # where the first index lies in the model's tensor


@dataclass(frozen=True, slots=True)
class ParameterPlacement:
    """Where a rank's parameter or buffer lies in the model's: all of it, or some stretches of one axis."""

    name: str  # the model's name for the tensor
    shape: Shape  # shape of the model's tensor
    axis: int = 0  # the axis that is divided (by tensor parallelism)
    segments: tuple[DimSegment, ...] | None = None  # what the rank has of that axis; None for all

    @classmethod
    def unsharded(cls, name: str, tensor: torch.Tensor) -> ParameterPlacement:
        """Return the placement of a tensor that is not sharded."""
        return cls(name, tuple(tensor.shape))

    def shards(self, offsets: Sequence[int], values: torch.Tensor) -> list[TensorShard]:
        """Return where a box of the rank's tensor, at `offsets` in it, lies in the model's; views of its `values`."""
        if self.segments is None:
            return [TensorShard(self.name, self.shape, tuple(offsets), values)]
        found = []
        first = offsets[self.axis]
        for segment in self.segments:
            begin, end = max(segment.begin, first), min(segment.end, first + values.shape[self.axis])
            if begin < end:
                moved = list(offsets)
                moved[self.axis] = segment.at + begin - segment.begin
                view = values.narrow(self.axis, begin - first, end - begin)
                found.append(TensorShard(self.name, self.shape, tuple(moved), view))
        return found


def boxes(shape: Shape, begin: int, end: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Cut elements `begin` to `end` of a row-major array into boxes, at most two for each axis and one.

    Yields offsets and sizes of a box, and the number of its first element.
    """
    if begin >= end:
        return
    if len(shape) <= 1:
        yield ((begin,), (end - begin,), begin) if shape else ((), (), 0)
        return
    inner = math.prod(shape[1:])
    first, last = -(-begin // inner), end // inner  # whole rows
    zeros = (0,) * (len(shape) - 1)
    if first > last:  # inside one row
        first, last = last, last - 1
        parts = [(first, begin, end)]
    else:
        parts = [(first - 1, begin, first * inner), (last, max(begin, last * inner), end)]
    for row, row_begin, row_end in parts[:1]:
        for offsets, sizes, at in boxes(shape[1:], row_begin - row * inner, row_end - row * inner):
            yield (row, *offsets), (1, *sizes), at + row * inner
    if first < last:
        yield (first, *zeros), (last - first, *shape[1:]), first * inner
    for row, row_begin, row_end in parts[1:]:
        for offsets, sizes, at in boxes(shape[1:], row_begin - row * inner, row_end - row * inner):
            yield (row, *offsets), (1, *sizes), at + row * inner


def memory_order(strides: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Return the axes of a tensor that fills memory without gaps, the one with the longest stride first."""
    return sorted(range(len(shape)), key=lambda axis: (-strides[axis], -shape[axis], axis))


@dataclass(frozen=True, slots=True)
class ShardBox:
    """A box of a rank's tensor, or all of it."""

    place: ParameterPlacement  # where the rank's tensor lies in the model's
    offsets: Shape  # offsets of the box in the rank's tensor

    @classmethod
    def full(cls, place: ParameterPlacement) -> ShardBox:
        """Return the whole of the rank's tensor."""
        return cls(place, (0,) * len(place.shape))

    def shards(self, values: torch.Tensor) -> list[TensorShard]:
        """Return the parts of the model's tensor that a tensor of the box's shape holds, as views of it."""
        return self.place.shards(self.offsets, values)


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements `begin` to `end` of a tensor in the order in which they lie in memory."""

    place: ParameterPlacement  # where the rank's tensor lies in the model's
    shape: Shape  # shape of the rank's tensor
    order: tuple[int, ...]  # axes of the rank's tensor, the one with the longest stride first
    begin: int  # first element
    end: int  # one past the last element

    def shards(self, values: torch.Tensor) -> list[TensorShard]:
        """Return the parts of the model's tensor that a 1-D tensor of `end - begin` values holds, as views of it."""
        permuted = tuple(self.shape[axis] for axis in self.order)
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        found = []
        for offsets, sizes, at in boxes(permuted, self.begin, self.end):
            first = at - self.begin
            view = values[first : first + math.prod(sizes)].view(sizes).permute(back)
            found += self.place.shards([offsets[axis] for axis in back], view)
        return found
