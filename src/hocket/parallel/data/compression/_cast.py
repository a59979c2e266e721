"""Gradients in a smaller floating-point type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from ._compressor import Compressor, Job


class Cast(Compressor):
    """Rounds to a type of two bytes and sums in it; divided by the number of ranks first, so that the sum has room."""

    dtype: ClassVar[torch.dtype]

    def takes(self, dtype: torch.dtype) -> bool:
        """Types of two bytes are small enough as they are."""
        return dtype.is_floating_point and dtype.itemsize > self.dtype.itemsize

    def exchange(self, job: Job) -> Iterator[Any]:
        """See Compressor."""
        flat, link = job.flat, job.link
        wire = job.memory.wire("wire", [flat.numel()], self.dtype, flat.device)
        torch.mul(flat, 1 / link.size, out=wire)
        if job.measure:
            whole = flat.to(job.computing)
            job.note(wire.to(job.computing) * link.size - whole, float(whole.square().sum()))
        if not job.scattered:
            yield link.all_reduce(wire)
            flat.copy_(wire)
            return
        mine = wire.view(link.size, -1)[link.rank]
        yield link.reduce_scatter(mine, wire)
        job.out.copy_(mine)

    def announced(self, job: Job) -> list[tuple[str, int]]:
        """See Compressor: two bytes an element."""
        return [("reduce_scatter" if job.scattered else "all_reduce", job.flat.numel() * self.dtype.itemsize)]
