"""Who owns which indices of a divided dim, and which indices of its input an operation's output needs.

All of it is arithmetic on intervals that every rank can do for all ranks, so nothing has to be agreed upon.

Source: Dryden et al., Improving strong-scaling of CNN training by exploiting finer-grained parallelism, 2019 (spatial
decomposition and halo exchange); Oyama et al., The case for strong scaling in deep learning, 2020 (3-D, CosmoFlow).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Interval = tuple[int, int]
"""Indices from the first to one below the second."""


@dataclass(frozen=True, slots=True)
class Slabs:
    """How a dim of a tensor is divided among ranks: into neighbouring intervals, perhaps of unequal length.

    Attributes:
        dim: which, counted from the end (-2 for the height of images, -3 for the depth of volumes).
        bounds: rank r owns the indices from bounds[r] to bounds[r + 1]; the first is 0 and the last the full size.
    """

    dim: int
    bounds: tuple[int, ...]

    @classmethod
    def even(cls, size: int, ranks: int, dim: int) -> Slabs:
        """As equal as can be, the first ranks one index more."""
        each, rest = divmod(size, ranks)
        return cls(dim, tuple(rank * each + min(rank, rest) for rank in range(ranks + 1)))

    @property
    def size(self) -> int:
        """Length of the full dim."""
        return self.bounds[-1]

    @property
    def ranks(self) -> int:
        """How many share it."""
        return len(self.bounds) - 1

    def interval(self, rank: int) -> Interval:
        """What a rank owns."""
        return self.bounds[rank], self.bounds[rank + 1]

    def length(self, rank: int) -> int:
        """How much a rank owns; it may be nothing."""
        return self.bounds[rank + 1] - self.bounds[rank]

    def intervals(self) -> list[Interval]:
        """What each rank owns."""
        return [self.interval(rank) for rank in range(self.ranks)]


@dataclass(frozen=True, slots=True)
class Window:
    """How outputs of a convolution or a pooling depend on its inputs along one dim.

    Output o is made of the inputs o * stride - low + dilation * j for j from 0 to kernel - 1.

    Attributes:
        kernel: its length.
        stride: from one output to the next.
        dilation: from one element of the kernel to the next.
        low: padding before the first input.
        high: padding after the last.
        ceil: whether a last window may reach beyond the padding, as poolings have it.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    low: int = 0
    high: int = 0
    ceil: bool = False

    @property
    def reach(self) -> int:
        """Inputs from the first to the last of a window."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, size: int) -> int:
        """How many outputs `size` inputs have."""
        free = size + self.low + self.high - self.reach
        if not self.ceil:
            return free // self.stride + 1
        count = -(-free // self.stride) + 1
        # A window must not begin in the padding at the end.
        return count - 1 if (count - 1) * self.stride >= size + self.low else count

    def divide(self, inputs: Slabs) -> Slabs:
        """How the outputs are divided: each belongs to the owner of the input under the middle of its window."""
        count = self.outputs(inputs.size)
        middle = (self.reach - 1) // 2 - self.low
        inner = [min(count, max(0, -((middle - bound) // self.stride))) for bound in inputs.bounds[1:-1]]
        return Slabs(inputs.dim, (0, *inner, count))

    def needed(self, outputs: Interval) -> Interval:
        """The inputs of an interval of outputs; those below 0 and beyond the last are padding."""
        begin, end = outputs
        if begin >= end:
            return 0, 0
        return begin * self.stride - self.low, (end - 1) * self.stride - self.low + self.reach


def transposed_needs(window: Window, outputs: Interval, size: int) -> Interval:
    """The inputs, of `size`, that reach an interval of the outputs of a transposed convolution."""
    begin, end = outputs
    first = -(-(begin + window.low - window.reach + 1) // window.stride)
    last = (end - 1 + window.low) // window.stride
    first, last = max(0, first), min(size - 1, last)
    return (first, last + 1) if begin < end and first <= last else (0, 0)


def divide_transposed(window: Window, inputs: Slabs, count: int) -> Slabs:
    """How `count` outputs of a transposed convolution are divided: each belongs to the input in its middle."""
    shift = (window.reach - window.stride + 1) // 2 - window.low
    inner = [min(count, max(0, bound * window.stride + shift)) for bound in inputs.bounds[1:-1]]
    return Slabs(inputs.dim, (0, *inner, count))


def overlap(one: Interval, other: Interval) -> Interval:
    """The indices in both; an empty interval begins and ends at once."""
    begin, end = max(one[0], other[0]), min(one[1], other[1])
    return (begin, end) if begin < end else (begin, begin)


def halo_rows(inputs: Slabs, wanted: Sequence[Interval]) -> list[int]:
    """How many indices each rank needs and does not own; what lies outside the tensor is padding and costs nothing."""
    found = []
    for rank, interval in enumerate(wanted):
        begin, end = overlap(interval, (0, inputs.size))
        own = overlap((begin, end), inputs.interval(rank))
        found.append(end - begin - (own[1] - own[0]))
    return found


def halo_nbytes(inputs: Slabs, window: Window, row_nbytes: int) -> int:
    """Bytes that all ranks together receive before a convolution or pooling; its back-propagation sends as many back.

    For a convolution that keeps the size (stride 1, padding on both sides, slabs not shorter than the padding) that is
    (ranks - 1) * dilation * (kernel - 1) * row_nbytes.

    Args:
        inputs: how its input is divided.
        window: of the convolution along the divided dim.
        row_nbytes: bytes of the input at one index of the divided dim: all samples, channels and other dims.
    """
    outputs = window.divide(inputs)
    return sum(halo_rows(inputs, [window.needed(one) for one in outputs.intervals()])) * row_nbytes
