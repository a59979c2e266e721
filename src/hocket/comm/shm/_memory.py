"""Tensors that live in shared memory, so that collectives can work on them in place.

Allocation is first fit from arenas (one segment each) and, as in torch's caching allocator for GPUs, freed memory stays
with the process to be used again: peers may hold mappings of an arena, and a mapping that never changes needs no
invalidation protocol.
"""

import bisect
import os
import threading
import weakref
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ._segment import SharedSegment

ALIGNMENT = 64
ARENA_NBYTES = 64 * 2**20


class MemoryHandle(NamedTuple):
    """Where a registered tensor lies: arena (by serial number and descriptor), its size, and the offset in it."""

    arena: int
    fd: int
    arena_nbytes: int
    offset: int


class _Arena:
    def __init__(self, serial: int, nbytes: int) -> None:
        self.serial = serial
        self.segment = SharedSegment.create(f"arena-{serial}", nbytes)
        self.free: list[tuple[int, int]] = [(0, self.segment.nbytes)]  # (offset, nbytes), sorted

    def take(self, nbytes: int) -> int | None:
        for i, (offset, free_nbytes) in enumerate(self.free):
            if free_nbytes >= nbytes:
                if free_nbytes == nbytes:
                    del self.free[i]
                else:
                    self.free[i] = (offset + nbytes, free_nbytes - nbytes)
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        i = bisect.bisect(self.free, (offset, nbytes))
        if i < len(self.free) and self.free[i][0] == offset + nbytes:
            nbytes += self.free.pop(i)[1]
        if i > 0 and sum(self.free[i - 1]) == offset:
            previous, free_nbytes = self.free[i - 1]
            self.free[i - 1] = (previous, free_nbytes + nbytes)
        else:
            self.free.insert(i, (offset, nbytes))


class SharedMemory:
    """The arenas of this process and the tensors handed out from them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run in the middle of an allocation
        self._arenas: list[_Arena] = []
        self._bases: list[int] = []
        self._sorted: list[_Arena] = []
        self._pid = os.getpid()

    def allocate(self, nbytes: int) -> memoryview:
        """Return a stretch of zero or old bytes in shared memory, given back when the last user of it is gone."""
        padded_nbytes = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if self._pid != os.getpid():
                self._forget_parent()
            for arena in self._arenas:
                offset = arena.take(padded_nbytes)
                if offset is not None:
                    break
            else:
                arena = self._add(max(ARENA_NBYTES, padded_nbytes))
                offset = arena.take(padded_nbytes)
                assert offset is not None
            view = arena.segment.view[offset : offset + nbytes]
            weakref.finalize(view, self._give, arena, offset, padded_nbytes).atexit = False
            return view

    def find(self, address: int, nbytes: int) -> MemoryHandle | None:
        """Return where the `nbytes` at `address` lie in the arenas; None if they do not."""
        i = bisect.bisect(self._bases, address) - 1
        if i < 0:
            return None
        arena = self._sorted[i]
        offset = address - arena.segment.base
        if offset + nbytes > arena.segment.nbytes or self._pid != os.getpid():
            return None
        return MemoryHandle(arena.serial, arena.segment.fd, arena.segment.nbytes, offset)

    def at(self, place: MemoryHandle, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return what lies there as a flat tensor, which does not keep the place from being given to others."""
        arena = self._arenas[place.arena].segment.tensor
        return arena.narrow(0, place.offset, numel * dtype.itemsize).view(dtype)

    def _add(self, nbytes: int) -> _Arena:
        arena = _Arena(len(self._arenas), nbytes)
        self._arenas.append(arena)
        ordered = sorted(self._arenas, key=lambda a: a.segment.base)
        # Readers bisect without the lock: put the arenas in place before the addresses that lead to them.
        self._sorted, self._bases = ordered, [a.segment.base for a in ordered]
        return arena

    def _give(self, arena: _Arena, offset: int, nbytes: int) -> None:
        with self._lock:
            if self._pid == os.getpid():
                arena.give(offset, nbytes)

    def _forget_parent(self) -> None:
        """After a fork the arenas belong to the parent; the child starts its own."""
        self._arenas, self._bases, self._sorted, self._pid = [], [], [], os.getpid()


shared_memory = SharedMemory()


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a CPU tensor in shared memory, registered with the transports, its values undefined.

    Collectives of the "hocket" backend on contiguous registered tensors reduce in place, without staging.

    Args:
        *size: Shape, as integers or as one sequence.
        dtype: Element type; torch's default if None.
    """
    shape: Any = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
    dtype = dtype or torch.get_default_dtype()
    numel = prod(shape)
    if numel == 0:
        return torch.empty(shape, dtype=dtype)
    view = shared_memory.allocate(numel * dtype.itemsize)
    return torch.frombuffer(view, dtype=dtype, count=numel).view(shape)


def zeros(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Like `empty`, filled with zeros."""
    return empty(*size, dtype=dtype).zero_()


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return an undefined registered tensor with the shape and element type of `tensor`."""
    return empty(tuple(tensor.shape), dtype=tensor.dtype)


def is_registered(tensor: torch.Tensor) -> bool:
    """Return whether collectives can work on `tensor` in place: contiguous, on the CPU and from this module."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and shared_memory.find(tensor.data_ptr(), tensor.numel() * tensor.element_size()) is not None
    )
