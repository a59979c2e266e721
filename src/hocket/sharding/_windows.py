"""Which indices of its input an operator's output needs along a divided dim, where a window slides over it.

All of it is arithmetic on intervals that every rank can do for all ranks, so nothing has to be agreed upon.

Source: Dryden et al., Improving strong-scaling of CNN training by exploiting finer-grained parallelism, 2019 (spatial
decomposition and halo exchange); Oyama et al., The case for strong scaling in deep learning, 2020 (3-D, CosmoFlow).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ._placement import Interval, Shard


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """How outputs of a convolution or a pooling depend on its inputs along one dim.

    Output o is made of the inputs o * stride - low + dilation * j for j from 0 to kernel - 1.

    Attributes:
        kernel: elements of the window.
        stride: inputs from one output's window to the next.
        dilation: inputs from one element of the window to the next.
        low: padding before the first input.
        high: padding after the last input.
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
        """Return how many outputs `size` inputs have."""
        free = size + self.low + self.high - self.reach
        if not self.ceil:
            return free // self.stride + 1
        count = -(-free // self.stride) + 1
        # A window must not begin in the padding at the end.
        return count - 1 if (count - 1) * self.stride >= size + self.low else count

    def divide(self, inputs: Shard) -> Shard:
        """Return how the outputs are divided: each belongs to the owner of the input under its window's middle."""
        count = self.outputs(inputs.size)
        middle = (self.reach - 1) // 2 - self.low
        return _bounded(inputs, count, [-((middle - bound) // self.stride) for bound in inputs.bounds[0][1:-1]])

    def needed(self, outputs: Interval) -> Interval:
        """Return the inputs of an interval of outputs; those below 0 and beyond the last are padding."""
        begin, end = outputs
        if begin >= end:
            return 0, 0
        return begin * self.stride - self.low, (end - 1) * self.stride - self.low + self.reach

    def divide_transposed(self, inputs: Shard, count: int) -> Shard:
        """Return how `count` outputs of the transposed convolution are divided: by the inputs in their middles."""
        shift = (self.reach - self.stride + 1) // 2 - self.low
        return _bounded(inputs, count, [bound * self.stride + shift for bound in inputs.bounds[0][1:-1]])

    def needed_transposed(self, outputs: Interval, size: int) -> Interval:
        """Return the inputs, of `size`, that reach an interval of the outputs of the transposed convolution."""
        begin, end = outputs
        first = -(-(begin + self.low - self.reach + 1) // self.stride)
        last = (end - 1 + self.low) // self.stride
        first, last = max(0, first), min(size - 1, last)
        return (first, last + 1) if begin < end and first <= last else (0, 0)


def _bounded(inputs: Shard, count: int, inner: Sequence[int]) -> Shard:
    return Shard(inputs.dim, ((0, *(min(count, max(0, one)) for one in inner), count),))


def overlap(one: Interval, other: Interval) -> Interval:
    """Return the indices in both; an empty interval begins and ends at once."""
    begin, end = max(one[0], other[0]), min(one[1], other[1])
    return (begin, end) if begin < end else (begin, begin)


def halo_rows(inputs: Shard, wanted: Sequence[Interval]) -> list[int]:
    """Return how many indices each rank needs and does not own; what lies outside is padding, and free."""
    found = []
    for own, interval in zip(inputs.intervals(), wanted, strict=True):
        begin, end = overlap(interval, (0, inputs.size))
        mine = overlap((begin, end), own)
        found.append(end - begin - (mine[1] - mine[0]))
    return found


def halo_nbytes(inputs: Shard, window: SlidingWindow, row_nbytes: int) -> int:
    """Return the bytes that all ranks together receive before a convolution or pooling.

    Its back-propagation sends as many back. For a convolution that keeps the size (stride 1, padding on both sides,
    shards not shorter than the padding) that is (ranks - 1) * dilation * (kernel - 1) * row_nbytes.

    Args:
        inputs: how the input of the operator is divided.
        window: the operator's window along the divided dim.
        row_nbytes: bytes of the input at one index of the divided dim: all samples, channels and other dims.
    """
    outputs = window.divide(inputs)
    return sum(halo_rows(inputs, [window.needed(one) for one in outputs.intervals()])) * row_nbytes
