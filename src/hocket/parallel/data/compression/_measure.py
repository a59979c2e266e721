"""How long the current link takes for gradients as they are, and compressed."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...mesh import World
from ._compressor import BucketJob, BucketMemory, Compressor, CountingGroup, Matrix, exchange_dense

_SMALL_NBYTES = 16 * 2**10
_LARGE_NBYTES = 2**20  # on a link of 100 Mbit/s all that is measured takes about a second
_REPETITIONS = 3  # the first of them warms up


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds as a function of bytes: what an operation costs at least, and for each byte."""

    latency_s: float  # seconds of an operation of no bytes
    s_per_byte: float  # seconds for each byte of gradients

    def seconds(self, nbytes: float) -> float:
        """For gradients of `nbytes`."""
        return self.latency_s + self.s_per_byte * nbytes

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> "Line":
        """Through two points of bytes and seconds, neither falling nor negative at its beginning."""
        slope = max(0.0, (large[1] - small[1]) / (large[0] - small[0])) if large[0] > small[0] else 0.0
        return cls(max(0.0, small[1] - slope * small[0]), slope)


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """What was measured, with nothing to hide behind: the slowest rank's times."""

    plain: Line  # time of gradients reduced as they are
    compressed: Line  # time of gradients encoded, exchanged and decoded


def measure_link(
    method: Compressor, world: World, numel: int, dtype: torch.dtype, device: torch.device, *, scattered: bool
) -> LinkTimes:
    """Time exchanges of two sizes, with and without compression; a collective operation.

    `numel` is that of the largest bucket, since nothing larger need be measured; with `scattered` each rank needs its
    part only.
    """
    sizes = [_SMALL_NBYTES, min(_LARGE_NBYTES, max(_SMALL_NBYTES, numel * dtype.itemsize))]
    points: list[float] = []
    for i, nbytes in enumerate(sizes):
        job = _job(nbytes // dtype.itemsize, world, dtype, device, scattered=scattered)
        sizes[i] = job.flat.numel() * job.flat.element_size()
        points.append(_fastest(lambda job=job: exchange_dense(job), world))  # type: ignore[misc]
        points.append(_fastest(lambda job=job: method.exchange(job), world))  # type: ignore[misc]
    slowest = torch.tensor(points, dtype=torch.float64, device=world.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=world.group)
    plain_small, small, plain_large, large = slowest.tolist()
    return LinkTimes(
        plain=Line.through((sizes[0], plain_small), (sizes[1], plain_large)),
        compressed=Line.through((sizes[0], small), (sizes[1], large)),
    )


def _job(numel: int, world: World, dtype: torch.dtype, device: torch.device, *, scattered: bool) -> BucketJob:
    """Make normal numbers in the shape of one matrix, as square as the ranks can divide it."""
    columns = math.isqrt(numel) // 8 * 8
    rows = -(-numel // (columns * world.size)) * world.size
    generator = torch.Generator().manual_seed(world.rank)
    flat = torch.randn(rows * columns, generator=generator).to(device, dtype)
    return BucketJob(
        flat=flat,
        out=flat.view(world.size, -1)[world.rank] if scattered else flat,
        scattered=scattered,
        matrices=[Matrix(0, rows, columns)],
        gaps=torch.empty(0, dtype=torch.int64, device=device),
        link=CountingGroup(world.group, world.rank, world.size),
        memory=BucketMemory(),
        generator=torch.Generator(device).manual_seed(world.rank),
    )


def _fastest(exchange: Callable[[], Iterator[Any]], world: World) -> float:
    times_s = []
    for _ in range(_REPETITIONS):
        dist.barrier(group=world.group)
        begin_s = time.perf_counter()
        for work in exchange():
            work.wait()
        if torch.cuda.is_available() and world.device.type == "cuda":
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - begin_s)
    return min(times_s[1:])
