"""Gradients in a smaller floating-point type: float16 or bfloat16."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from ._compressor import BucketJob, Compressor


class Cast(Compressor):
    """Rounds to two bytes and sums in that type, divided by the number of ranks first, so that sums stay in range."""

    dtype: ClassVar[torch.dtype]

    def takes(self, dtype: torch.dtype) -> bool:
        """Types of two bytes are small enough as they are."""
        return dtype.is_floating_point and dtype.itemsize > self.dtype.itemsize

    def exchange(self, job: BucketJob) -> Iterator[Any]:
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

    def announced(self, job: BucketJob) -> list[tuple[str, int]]:
        """See Compressor: two bytes an element."""
        return [("reduce_scatter" if job.scattered else "all_reduce", job.flat.numel() * self.dtype.itemsize)]


class Fp16(Cast):
    """IEEE half precision: 11 bits of precision, values of the average from 6e-8 to 65504 in size.

    Horovod's `Compression.fp16` (Sergeev and Del Balso 2018). What is larger becomes infinite on every rank.
    """

    name = "fp16"
    dtype = torch.float16


class Bf16(Cast):
    """The upper half of a float32: its range, with 8 bits of precision (Kalamkar et al. 2019)."""

    name = "bf16"
    dtype = torch.bfloat16
