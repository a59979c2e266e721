"""Buckets: flat memory that holds gradients side by side, views of it for `.grad`, and which gradients share one."""

import sys
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from hocket import comm
from hocket.planner import BucketSizes

_ALIGNMENT_NBYTES = 64


class Slot(NamedTuple):
    """Where a gradient lies in the flat memory, and how it is laid out there."""

    offset: int
    numel: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Bucket:
    """Gradients of some parameters in one flat tensor, reduced by one operation.

    On the CPU the memory is shared (`hocket.comm.empty`): backend "hocket" reduces it in place, without staging.
    """

    def __init__(
        self,
        members: Sequence[int],  # numbers of the parameters
        parameters: Sequence[torch.Tensor],  # the parameters, of one element type and device
        extra: int,  # elements to add at the end for the reducer's own use
        *,
        parts: int = 1,  # how many equal parts the memory must have
        attached: bool = True,  # whether to have memory from the beginning
    ) -> None:
        self.members = list(members)
        self.pending = len(self.members)
        self.work: Any = None
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        step = max(1, _ALIGNMENT_NBYTES // self.dtype.itemsize)
        offsets, end = [], 0
        for parameter in parameters:
            offsets.append(end)
            end += -(-parameter.numel() // step) * step
        self._end = end
        self._views: list[torch.Tensor]
        self.numel = end + extra if parts == 1 else -(-(end + extra) // (parts * step)) * parts * step
        self.places = [Slot(offset, p.numel(), *_strides(p)) for offset, p in zip(offsets, parameters, strict=True)]
        self.detach()
        if attached:
            self.open()

    def memory(self) -> torch.Tensor:
        """Flat memory as a bucket needs it, of any contents."""
        if self.device.type == "cpu":
            return comm.empty(self.numel, dtype=self.dtype)
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    @property
    def attached(self) -> bool:
        """Whether it has memory."""
        return bool(self._views)

    def open(self) -> None:
        """Get memory if it has none."""
        if not self.attached:
            self.attach(self.memory().zero_())  # the gaps take part in the reduction

    def attach(self, flat: torch.Tensor) -> None:
        """Make `flat` the memory of the bucket."""
        self.flat = flat
        self.tail = flat[self._end :]
        self._views = [self._make_view(slot) for slot in range(len(self.members))]
        self._holders = self._count_holders(0)

    def detach(self) -> None:
        """Take the memory away."""
        self.flat = self.tail = torch.empty(0)
        self._views = []

    def cut(self, flat: torch.Tensor, slot: int) -> torch.Tensor:
        """Return what lies in `slot` of flat memory of the bucket's layout, in the parameter's shape and strides."""
        offset, numel, shape, strides = self.places[slot]
        return flat[offset : offset + numel].as_strided(shape, strides)

    def view(self, slot: int) -> torch.Tensor:
        """Return the gradient in `slot`: the same tensor object at each call, unless it was given other memory.

        So it is by a program that says `parameter.grad.data = ...`.
        """
        offset = self.places[slot].offset * self.dtype.itemsize
        if self._views[slot].data_ptr() not in (0, self.flat.data_ptr() + offset):
            self._views[slot] = self._make_view(slot)
        return self._views[slot]

    def writable(self, slot: int) -> torch.Tensor:
        """Return the view of `slot`, to be overwritten though it is no parameter's `.grad` at the moment.

        A program may have kept the tensor that was `.grad` in an earlier step. On one device that tensor would keep its
        values, so here it is given memory of its own first; so is one that has a graph, to leave that behind.
        """
        if self._views[slot].requires_grad or self._count_holders(slot) > self._holders:
            kept = self._views[slot]
            kept.data = kept.detach().clone()
        return self.view(slot)

    def _make_view(self, slot: int) -> torch.Tensor:
        # A view of what has no gradient, made where none are recorded, would refuse `parameter.grad += parameter`.
        return self.cut(self.flat, slot).detach()

    def _count_holders(self, slot: int) -> int:
        return sys.getrefcount(self._views[slot])


class Over:
    """Stands for the work of an operation that was over when it returned."""

    def wait(self) -> None:
        """Have nothing to wait for."""


def _strides(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the gradient's shape and strides: the parameter's if they fill memory without gaps, as in autograd."""
    shape, strides = tuple(parameter.shape), parameter.stride()
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return shape, torch.empty(shape, device="meta").stride()
        expected *= size
    return shape, strides


def bucket_layout(
    order: Sequence[int], nbytes: Sequence[int], kinds: Sequence[Hashable], sizes: BucketSizes
) -> list[list[int]]:
    """Divide parameters among buckets, in the order in which their gradients become ready.

    In `order` the first ready come first; `kinds` are what cannot share a bucket with others: element type and device.
    Returns for each bucket its parameters; buckets in the order in which they become full.
    """
    position = {number: i for i, number in enumerate(order)}
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for number in order:
        members, filled = open_buckets.get(kinds[number], ([], 0))
        if members and filled + nbytes[number] > (sizes.most if buckets else sizes.first):
            buckets.append(members)
            members, filled = [], 0
        members.append(number)
        open_buckets[kinds[number]] = (members, filled + nbytes[number])
    buckets.extend(members for members, _ in open_buckets.values())
    buckets.sort(key=lambda members: position[members[-1]])
    return buckets
