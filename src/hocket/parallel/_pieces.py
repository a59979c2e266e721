"""Where what a rank holds lies in the user's own model: names, full shapes, and boxes in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a local tensor lies in the model's.

    Attributes:
        name: the model's name for it.
        shape: of the whole.
        offsets: of the local tensor's first element in it.
    """

    name: str
    shape: Shape
    offsets: Shape

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Place:
        """The place of a tensor that is not divided."""
        return cls(name, tuple(tensor.shape), (0,) * tensor.ndim)


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
class Range:
    """Elements `begin` to `end` of a tensor in the order in which they lie in memory.

    Attributes:
        place: where the tensor lies in the model's.
        shape: of the tensor.
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
        """The boxes of the range that a 1-D tensor of `end - begin` values holds, as views of it."""
        permuted = tuple(self.shape[axis] for axis in self.order)
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        found = []
        for offsets, sizes, at in boxes(permuted, self.begin, self.end):
            first = at - self.begin
            view = values[first : first + math.prod(sizes)].view(sizes).permute(back)
            moved = tuple(self.place.offsets[axis] + offsets[back[axis]] for axis in range(len(self.order)))
            found.append(Piece(self.place.name, self.place.shape, moved, view))
        return found
