"""What a compressor is: how one bucket's gradients are encoded, combined over ranks and decoded."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from hocket import comm
from hocket.comm import torch_adapter


class CountingGroup:
    """A group of ranks whose collectives are asynchronous, and counted by the bytes that each rank sends."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        # what a rank has sent so far, by bandwidth-optimal algorithms: 2 (n - 1) / n of the vector for an all_reduce,
        # (n - 1) / n of it for the others
        self.sent_nbytes = 0.0

    def all_reduce(self, tensor: torch.Tensor, operator: Any = dist.ReduceOp.SUM) -> Any:
        """Sum in place."""
        self._count(tensor, 2)
        return dist.all_reduce(tensor, op=operator, group=self.group, async_op=True)

    def reduce_scatter(self, mine: torch.Tensor, tensor: torch.Tensor) -> Any:
        """Sum, and put this rank's n-th of the sum into `mine`."""
        self._count(tensor, 1)
        return torch_adapter.reduce_scatter_single(mine, tensor, group=self.group, async_op=True)

    def all_gather(self, every: torch.Tensor, mine: torch.Tensor) -> Any:
        """Put every rank's `mine`, by rank, into `every`, shape [n, ...]."""
        self._count(every, 1)
        return torch_adapter.all_gather_single(every.view(-1), mine.view(-1), group=self.group, async_op=True)

    def all_to_all(self, received: torch.Tensor, given: torch.Tensor) -> Any:
        """Send row r of `given`, shape [n, ...], to rank r, whose row for this rank goes to row r of `received`."""
        self._count(given, 1)
        return dist.all_to_all_single(received.view(-1), given.view(-1), group=self.group, async_op=True)

    def _count(self, tensor: torch.Tensor, ways: int) -> None:
        self.sent_nbytes += ways * (self.size - 1) / self.size * tensor.numel() * tensor.element_size()


class Matrix(NamedTuple):
    """A gradient inside a bucket's flat memory, as the matrix that low-rank methods see."""

    offset: int  # offset of its first element
    rows: int  # the size of the axis with the largest stride
    columns: int  # the product of all other axes

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the matrix in any flat memory of the bucket's layout, shape [rows, columns]."""
        return flat[self.offset : self.offset + self.rows * self.columns].view(self.rows, self.columns)


class BucketMemory:
    """Tensors that a compressor keeps for one bucket from step to step: residuals, and buffers to be used again."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def zeros(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the tensor of this name: zeros at the first call, and later as it was left."""
        found = self._kept.get(name)
        if found is None or found.shape != torch.Size(shape) or found.dtype != dtype or found.device != device:
            found = self._kept[name] = torch.zeros(tuple(shape), dtype=dtype, device=device)
        return found

    def wire(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the same for what is sent or received: on the CPU it lies where backend "hocket" needs no staging."""
        found = self._kept.get(name)
        if found is None or found.shape != torch.Size(shape) or found.dtype != dtype:
            made = comm.zeros(tuple(shape), dtype=dtype) if device.type == "cpu" else None
            found = torch.zeros(tuple(shape), dtype=dtype, device=device) if made is None else made
            self._kept[name] = found
        return found

    def find(self, name: str) -> torch.Tensor | None:
        """Return the tensor of this name, if there is one."""
        return self._kept.get(name)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._kept.values())


@dataclass(slots=True)
class BucketJob:
    """One bucket's gradients in one step."""

    flat: torch.Tensor  # the gradients of this rank, side by side; a float type, shape [numel]
    out: torch.Tensor  # where the average goes: `flat` itself, or this rank's part of it, shape [numel / world]
    scattered: bool  # whether each rank needs its part only
    matrices: Sequence[Matrix]  # the gradients in `flat`
    gaps: torch.Tensor  # places in `flat` that belong to no gradient, int64; they hold zeros
    link: CountingGroup  # the ranks and their collectives
    memory: BucketMemory  # memory of this bucket
    generator: torch.Generator  # random numbers, other ones on every rank
    measure: bool = False  # whether to find out what error compression makes this time
    error: float | None = None  # error of what was sent: ||C(x) - x|| / ||x||; None where it was not measured

    @property
    def computing(self) -> torch.dtype:
        """The type in which to compute: float64 for float64, else float32."""
        return torch.float64 if self.flat.dtype is torch.float64 else torch.float32

    def note(self, left: torch.Tensor, squares: float) -> None:
        """Note the error: what was left of a vector whose squares added up to `squares`."""
        self.error = float(torch.linalg.vector_norm(left)) / squares**0.5 if squares > 0 else 0.0


class Compressor(ABC):
    """How gradients are made smaller before they are averaged. Every rank gets the same average, bit by bit."""

    name: ClassVar[str]  # the compressor's name in plans
    unbiased: ClassVar[bool] = False  # whether the expected value of what is sent is what was to be sent
    feedback: ClassVar[bool] = False  # whether what is not sent is added to the next step's gradients

    @abstractmethod
    def exchange(self, job: BucketJob) -> Iterator[Any]:
        """Average over ranks: a generator that yields each operation it has posted, and goes on when that is over.

        It must have read `job.flat` before its first yield, and have written `job.out` at its end. A gradient that is
        not finite makes the average not finite on every rank, and leaves no trace in what is kept for later steps.
        """

    @abstractmethod
    def announced(self, job: BucketJob) -> list[tuple[str, int]]:
        """Return kind and bytes of the operations that `exchange` posts for a job, as `hocket.comm` announces them."""

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether gradients of this type are compressed; others go as they are."""
        return dtype.is_floating_point

    def residual(self, job: BucketJob) -> torch.Tensor | None:
        """Return what is kept for later steps, in the layout of `job.flat`: a copy; None where nothing is."""
        return None

    def restore(self, job: BucketJob, residual: torch.Tensor) -> None:
        """Put back what `residual` gave, of the layout of `job.flat`."""
        raise AssertionError(f"{self.name} keeps nothing from step to step")


def exchange_dense(job: BucketJob) -> Iterator[Any]:
    """Exchange without compression, in the type that the gradients have."""
    flat, link = job.flat, job.link
    flat.mul_(1 / link.size)  # before the sum: in float16 it may be beyond the range where the average is not
    if job.scattered:
        yield link.reduce_scatter(job.out, flat)
    else:
        yield link.all_reduce(flat)


def announced_dense(job: BucketJob) -> list[tuple[str, int]]:
    """Return kind and bytes of the operation that `exchange_dense` posts."""
    return [("reduce_scatter" if job.scattered else "all_reduce", job.flat.numel() * job.flat.element_size())]
