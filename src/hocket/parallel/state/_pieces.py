"""Where what a rank holds lies in the user's own model: names, full shapes, and boxes in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor of the model that this rank holds.

    Attributes:
        name: the tensor's name in the model.
        shape: of the whole tensor.
        offsets: of the box in it.
        tensor: the box's values; changing them changes what the rank holds.
    """

    name: str
    shape: Shape
    offsets: Shape
    tensor: torch.Tensor


class Segment(NamedTuple):
    """Indices of a rank's tensor along one axis, and where they lie in the model's.

    Attributes:
        begin: the first, in the rank's tensor.
        end: one past the last.
        at: where the first lies in the model's tensor.
    """

    begin: int
    end: int
    at: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank's parameter or buffer lies in the model's: all of it, or some stretches of one axis.

    Attributes:
        name: the model's name for it.
        shape: of the model's.
        axis: the one that is divided (by tensor parallelism).
        segments: what the rank has of it; None for all.
    """

    name: str
    shape: Shape
    axis: int = 0
    segments: tuple[Segment, ...] | None = None

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Place:
        """The place of a tensor that is not divided."""
        return cls(name, tuple(tensor.shape))

    def pieces(self, offsets: Sequence[int], values: torch.Tensor) -> list[Piece]:
        """Where a box of the rank's tensor lies in the model's.

        Args:
            offsets: of the box in the rank's tensor.
            values: of the box; the pieces are views of it.
        """
        if self.segments is None:
            return [Piece(self.name, self.shape, tuple(offsets), values)]
        found = []
        first = offsets[self.axis]
        for segment in self.segments:
            begin, end = max(segment.begin, first), min(segment.end, first + values.shape[self.axis])
            if begin < end:
                moved = list(offsets)
                moved[self.axis] = segment.at + begin - segment.begin
                view = values.narrow(self.axis, begin - first, end - begin)
                found.append(Piece(self.name, self.shape, tuple(moved), view))
        return found


def boxes(shape: Shape, begin: int, end: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Cuts elements `begin` to `end` of a row-major array into boxes, at most two for each axis and one.

    Yields:
        Offsets and sizes of a box, and the number of its first element.
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
    """The axes of a tensor that fills memory without gaps, the one with the longest stride first."""
    return sorted(range(len(shape)), key=lambda axis: (-strides[axis], -shape[axis], axis))


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a rank's tensor, or all of it.

    Attributes:
        place: where the rank's tensor lies in the model's.
        offsets: of the box in the rank's tensor.
    """

    place: Place
    offsets: Shape

    @classmethod
    def all_of(cls, place: Place) -> Box:
        """The whole of the rank's tensor."""
        return cls(place, (0,) * len(place.shape))

    def pieces(self, values: torch.Tensor) -> list[Piece]:
        """The parts of the model's tensor that a tensor of the box's shape holds, as views of it."""
        return self.place.pieces(self.offsets, values)


@dataclass(frozen=True, slots=True)
class Range:
    """Elements `begin` to `end` of a tensor in the order in which they lie in memory.

    Attributes:
        place: where the rank's tensor lies in the model's.
        shape: of the rank's tensor.
        order: its axes, the one with the longest stride first.
        begin: first element.
        end: one past the last.
    """

    place: Place
    shape: Shape
    order: tuple[int, ...]
    begin: int
    end: int

    def pieces(self, values: torch.Tensor) -> list[Piece]:
        """The parts of the model's tensor that a 1-D tensor of `end - begin` values holds, as views of it."""
        permuted = tuple(self.shape[axis] for axis in self.order)
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        found = []
        for offsets, sizes, at in boxes(permuted, self.begin, self.end):
            first = at - self.begin
            view = values[first : first + math.prod(sizes)].view(sizes).permute(back)
            found += self.place.pieces([offsets[axis] for axis in back], view)
        return found
