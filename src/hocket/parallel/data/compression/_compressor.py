"""What a compressor is: how one bucket's gradients are encoded, combined over ranks and decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from hocket import comm

from ._link import Link


class Matrix(NamedTuple):
    """A gradient inside a bucket's flat memory, as the matrix that low-rank methods see.

    Attributes:
        offset: of its first element.
        rows: the size of the axis with the largest stride.
        columns: all other axes.
    """

    offset: int
    rows: int
    columns: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The matrix in any flat memory of the bucket's layout, shape [rows, columns]."""
        return flat[self.offset : self.offset + self.rows * self.columns].view(self.rows, self.columns)


class Memory:
    """Tensors that a compressor keeps for one bucket from step to step: residuals, and buffers to be used again."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def zeros(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tensor of this name: zeros at the first call, and later as it was left."""
        found = self._kept.get(name)
        if found is None or found.shape != torch.Size(shape) or found.dtype != dtype or found.device != device:
            found = self._kept[name] = torch.zeros(tuple(shape), dtype=dtype, device=device)
        return found

    def wire(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The same for what is sent or received: on the CPU it lies where backend "hocket" needs no staging."""
        found = self._kept.get(name)
        if found is None or found.shape != torch.Size(shape) or found.dtype != dtype:
            made = comm.zeros(tuple(shape), dtype=dtype) if device.type == "cpu" else None
            found = torch.zeros(tuple(shape), dtype=dtype, device=device) if made is None else made
            self._kept[name] = found
        return found

    def find(self, name: str) -> torch.Tensor | None:
        """The tensor of this name, if there is one."""
        return self._kept.get(name)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._kept.values())


@dataclass(slots=True)
class Job:
    """One bucket's gradients in one step.

    Attributes:
        flat: the gradients of this rank, side by side; a float type, shape [numel].
        out: where their average goes: `flat` itself, or this rank's part of it, shape [numel / world].
        scattered: whether each rank needs its part only.
        matrices: the gradients in `flat`.
        gaps: places in `flat` that belong to none of them, int64; they hold zeros.
        link: the ranks.
        memory: of this bucket.
        generator: random numbers, other ones on every rank.
        measure: whether to find out what error compression makes this time.
        error: of what was sent: ||C(x) - x|| / ||x||; None where it was not measured.
    """

    flat: torch.Tensor
    out: torch.Tensor
    scattered: bool
    matrices: Sequence[Matrix]
    gaps: torch.Tensor
    link: Link
    memory: Memory
    generator: torch.Generator
    measure: bool = False
    error: float | None = None

    @property
    def computing(self) -> torch.dtype:
        """The type in which to compute: float64 for float64, else float32."""
        return torch.float64 if self.flat.dtype is torch.float64 else torch.float32

    def note(self, left: torch.Tensor, squares: float) -> None:
        """Notes the error: what was left of a vector whose squares added up to `squares`."""
        self.error = float(torch.linalg.vector_norm(left)) / squares**0.5 if squares > 0 else 0.0


class Compressor(ABC):
    """How gradients are made smaller before they are averaged. Every rank gets the same average, bit by bit.

    Attributes:
        name: in plans.
        unbiased: whether the expected value of what is sent is what was to be sent.
        feedback: whether what is not sent is added to the next step's gradients.
    """

    name: ClassVar[str]
    unbiased: ClassVar[bool] = False
    feedback: ClassVar[bool] = False

    @abstractmethod
    def exchange(self, job: Job) -> Iterator[Any]:
        """Averages over ranks: a generator that yields each operation it has posted, and goes on when that is over.

        It must have read `job.flat` before its first yield, and have written `job.out` at its end. A gradient that is
        not finite makes the average not finite on every rank, and leaves no trace in what is kept for later steps.
        """

    @abstractmethod
    def announced(self, job: Job) -> list[tuple[str, int]]:
        """Kind and bytes of the operations that `exchange` posts for such a job, as `hocket.comm` announces them."""

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether gradients of this type are compressed; others go as they are."""
        return dtype.is_floating_point

    def residual(self, job: Job) -> torch.Tensor | None:
        """What is kept for later steps, in the layout of `job.flat`: a copy; None where nothing is."""
        return None

    def restore(self, job: Job, residual: torch.Tensor) -> None:
        """Puts back what `residual` gave, of the layout of `job.flat`."""
        raise AssertionError(f"{self.name} keeps nothing from step to step")


def exchange_dense(job: Job) -> Iterator[Any]:
    """The exchange without compression, in the type that the gradients have."""
    flat, link = job.flat, job.link
    flat.mul_(1 / link.size)  # before the sum: in float16 it may be beyond the range where the average is not
    if job.scattered:
        yield link.reduce_scatter(job.out, flat)
    else:
        yield link.all_reduce(flat)


def announced_dense(job: Job) -> list[tuple[str, int]]:
    """Kind and bytes of the operation that `exchange_dense` posts."""
    return [("reduce_scatter" if job.scattered else "all_reduce", job.flat.numel() * job.flat.element_size())]
