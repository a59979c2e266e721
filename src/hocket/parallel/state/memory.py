"""How many bytes of a model's state this rank holds, counted and as the formulas say."""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hocket.sharding import strided_parts
from hocket.workload import Update, WorkloadError, optimizer_maker

_SAMPLE = 64, 64  # the shape of a parameter with which an optimizer's state is counted


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a model's state on one rank.

    Attributes:
        weights: Bytes of parameters and buffers.
        gradients: Bytes of gradients between back-propagation and update.
        optimizer: Bytes of the optimizer's state.
    """

    weights: float
    gradients: float
    optimizer: float

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.weights + other.weights, self.gradients + other.gradients, self.optimizer + other.optimizer
        )

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimizer

    def to_json(self) -> dict[str, float]:
        """Return the fields and the total as JSON values."""
        return {**asdict(self), "total": self.total}


def predicted(parameters: int, data: int, shard: str, *, optimizer_nbytes: float = 8) -> StateBytes:
    """Return what each of `data` ranks holds of float32 parameters.

    These are the formulas of Rajbhandari et al. 2020, with 4 bytes where they have 2. With N ranks and 8 bytes of
    optimizer state an element (Adam): 16P for none, 8P + 8P/N for "optimizer", 4P + 12P/N for "gradients", 16P/N for
    "parameters".

    Args:
        parameters: How many elements this rank would hold alone.
        data: Data-parallel ranks, N.
        shard: What is sharded, as in a plan.
        optimizer_nbytes: Bytes of state for each element.
    """
    divided = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}[shard]
    return StateBytes(
        weights=4 * parameters / (data if divided >= 3 else 1),
        gradients=4 * parameters / (data if divided >= 2 else 1),
        optimizer=optimizer_nbytes * parameters / (data if divided >= 1 else 1),
    )


def nbytes(tensors: Iterable[Any]) -> int:
    """Return bytes of what the tensors hold here, each element once though several views show it."""
    spans: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for part in strided_parts(local.detach()):
            if part.numel() and part.untyped_storage().nbytes():
                spans[part.data_ptr(), part.numel()] = part.numel() * part.element_size()
    covered, end = 0, 0
    for (begin, _), size in sorted(spans.items()):
        covered += max(0, begin + size - max(begin, end))
        end = max(end, begin + size)
    return covered


_WORTH_NBYTES = 32 << 20
"""Less that is free stays: to take pages anew costs more than they are worth."""


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in "abcdefgh") + (
        ("free", ctypes.c_size_t),
        ("top", ctypes.c_size_t),
    )


@functools.cache
def _allocator() -> tuple[Callable[[], int], Callable[[int], int]]:
    """Return what tells how many bytes the C library's allocator keeps, and what makes it return them (glibc's)."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return (lambda: 0), (lambda _: 0)
    if not hasattr(library, "mallinfo2"):  # before glibc 2.33
        return (lambda: _WORTH_NBYTES), library.malloc_trim
    library.mallinfo2.restype = _Mallinfo
    return (lambda: library.mallinfo2().free), library.malloc_trim


def give_back() -> None:
    """Return to the system the pages of freed memory that the allocator keeps, which may be most of a model."""
    free, trim = _allocator()
    if free() >= _WORTH_NBYTES:
        trim(0)


def counted(weights: Iterable[Any], gradients: Iterable[Any], optimizer: Any) -> StateBytes:
    """Return the bytes that these tensors, and those of the optimizer's state, hold on this rank."""
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return StateBytes(nbytes(weights), nbytes(gradients), nbytes(state))


def state_nbytes(optimizer: Any) -> float:
    """Return bytes of state that an optimizer keeps for each float32 element, as a workload counts them.

    It is made anew with its settings for that, and of one that cannot be made so 4 bytes are taken.
    """
    kind, group = type(optimizer), dict(*optimizer.param_groups[:1])
    known = inspect.signature(kind).parameters
    settings = {name: value for name, value in group.items() if name in known and name != "params"}
    sample = torch.nn.Parameter(torch.empty(_SAMPLE, device="meta"))
    try:
        with torch.random.fork_rng(devices=()):  # one may draw numbers
            return Update.of(optimizer_maker(kind, **settings), [sample]).state_bytes(sample) / sample.numel()
    except WorkloadError:
        return 4.0


def process_memory() -> dict[str, int]:
    """Return bytes of memory of this process, as Linux counts them: "resident" now (VmRSS), and its "peak" (VmHWM)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[key].split()[0]) * 1024 for name, key in (("resident", "VmRSS"), ("peak", "VmHWM"))}
