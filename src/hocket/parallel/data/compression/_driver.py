"""Compression of a reducer's buckets by any of the methods: exchanges are posted while back-propagation goes on."""

import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from hocket import comm
from hocket.planner import parse_compression

from ...mesh import World
from .._bucket import Bucket
from ._cast import Bf16, Fp16
from ._compressor import BucketJob, BucketMemory, Compressor, CountingGroup, Matrix
from ._int8 import Int8
from ._measure import LinkTimes, measure_link
from ._onebit import OneBit
from ._powersgd import PowerSgd
from ._report import CompressionTally
from ._terngrad import TernGrad
from ._topk import TopK

_LAG = 2
"""So many buckets later an exchange of several operations posts its next one. To post it, the one before must be over,
and back-propagation waits for that; meanwhile the operations of the buckets between keep the link busy."""

_MEASURED_AT = 2  # reductions, the first of which lays out buckets
_SEED = 0x5EED


COMPRESSORS: Mapping[str, Callable[..., Compressor]] = MappingProxyType(
    {kind.name: kind for kind in (Fp16, Bf16, Int8, TopK, OneBit, TernGrad, PowerSgd)}
)
"""What makes a compressor, by the method's name; it takes the parameter, where the method has one."""


def compressor(text: str) -> Compressor | None:
    """Return the compressor that a plan's `compression` names, as "int8" or "topk:0.01"; None for "none".

    Raises:
        ValueError: there is no such method, or its parameter makes no sense.
    """
    spec = parse_compression(text)
    if spec is None:
        return None
    values: list[Any] = [] if spec.value is None else [spec.value]
    return COMPRESSORS[spec.method](*values)


class Compression:
    """Compresses what a reducer's ranks exchange.

    Args:
        text: The method, as a plan names it, and not "none".
        world: The ranks.
    """

    def __init__(self, text: str, world: World) -> None:
        method = compressor(text)
        assert method is not None
        self.text = str(parse_compression(text))  # the method with its parameter
        self.method: Compressor = method  # the compressor
        self.link = CountingGroup(world.group, world.rank, world.size)
        self._world = world
        self._generators: dict[torch.device, torch.Generator] = {}
        self._memories: dict[int, tuple[Bucket, BucketMemory]] = {}  # by the id of a bucket, which is kept with it
        self._flying: list[BucketExchange] = []
        self._largest: Bucket | None = None
        self._times: LinkTimes | None = None
        self.tally = CompressionTally()

    def post(self, bucket: Bucket, number: int, *, own: slice | None = None) -> "BucketExchange | None":
        """Begin to average a bucket's gradients.

        The `bucket` is complete, its tail too, where every rank gets the whole average; `own` is the part that this
        rank needs, None for all.

        Returns:
            What to wait for; None where the bucket is to be sent as it is.
        """
        flat = bucket.flat if own is not None else bucket.flat[: bucket.numel - bucket.tail.numel()]
        if not flat.numel() or not self.method.takes(flat.dtype):
            return None
        if self._largest is None or bucket.numel * bucket.dtype.itemsize > _nbytes(self._largest):
            self._largest = bucket
        job = self._job(bucket, flat, own)
        flat.index_fill_(0, job.gaps, 0)
        job.measure = self.tally.measures
        marks = bucket.tail if own is None and bucket.tail.numel() else None
        for earlier in self._flying[:-_LAG]:
            if earlier.posts_more:
                earlier.advance()
        exchange = BucketExchange(self, self._run(job, marks), job, number)
        self._flying.append(exchange)
        exchange.advance()
        return exchange

    def land(self, exchange: "BucketExchange") -> None:
        """Wait for an exchange and, as far as it lets them, have the others go on."""
        for other in self._flying:
            if other is not exchange and other.posts_more:
                other.advance()
        while exchange.advance():
            pass
        if exchange in self._flying:
            self._flying.remove(exchange)
            self.tally.add(exchange.number, exchange.job, exchange.busy_s)

    def rebuilt(self, buckets: list[Bucket]) -> None:
        """Move what is left of each parameter's gradient along, as the reducer has laid out its buckets anew."""
        left: dict[int, torch.Tensor] = {}
        for bucket, memory in self._memories.values():
            job = self._job(bucket, bucket.flat[: bucket.numel - bucket.tail.numel()], None, memory)
            residual = self.method.residual(job)
            if residual is not None:
                left.update({i: bucket.cut(residual, slot).clone() for slot, i in enumerate(bucket.members)})
        self._memories.clear()
        self._largest = None
        self.tally.buckets.clear()
        for bucket in buckets:
            if not any(i in left for i in bucket.members):
                continue
            bucket.open()
            flat = bucket.flat[: bucket.numel - bucket.tail.numel()]
            job = self._job(bucket, flat, None)
            residual = torch.zeros(flat.numel(), dtype=job.computing, device=flat.device)
            for slot, i in enumerate(bucket.members):
                if i in left:
                    bucket.cut(residual, slot).copy_(left[i])
            self.method.restore(job, residual)

    def forget(self) -> None:
        """Drop what is left of earlier gradients: the weights they belong to are there no more."""
        self._memories.clear()

    def reduced(self) -> None:
        """Count a step, whose buckets are all averaged; once, measure what the link does without compression."""
        self.tally.steps += 1
        if self.tally.steps == _MEASURED_AT and self._largest is not None:
            bucket, scattered = self._largest, self.tally.scattered
            kind = bucket.numel, bucket.dtype, bucket.device
            self._times = measure_link(self.method, self._world, *kind, scattered=scattered)

    def report(self) -> dict[str, Any]:
        """Return what compression saved and what it cost, as JSON values."""
        held = sum(memory.nbytes for _, memory in self._memories.values())
        return self.tally.report(self.method, self.text, self.link, self._times, held)

    # --- one bucket -------------------------------------------------------------------------------------------------

    def _run(self, job: BucketJob, marks: torch.Tensor | None) -> Iterator[Any]:
        """Exchange, with the marks of used parameters, which must arrive as they are, in a byte each."""
        if marks is None:
            yield from self.method.exchange(job)
            return
        small = job.memory.wire("marks", [marks.numel()], torch.uint8, marks.device)
        small.copy_(marks)
        work = self.link.all_reduce(small, dist.ReduceOp.MAX)
        yield from self.method.exchange(job)
        work.wait()
        marks.copy_(small)

    def _job(
        self, bucket: Bucket, flat: torch.Tensor, own: slice | None, memory: BucketMemory | None = None
    ) -> BucketJob:
        if memory is None:
            _, memory = self._memories.setdefault(id(bucket), (bucket, BucketMemory()))
        return BucketJob(
            flat=flat,
            out=flat if own is None else flat[own],
            scattered=own is not None,
            matrices=[_matrix(*place) for place in bucket.places],
            gaps=_gaps(bucket, flat, memory),
            link=self.link,
            memory=memory,
            generator=self._generator(flat.device),
        )

    def _generator(self, device: torch.device) -> torch.Generator:
        """Random numbers of this rank's own, which leave the program's alone and are the same in every run."""
        found = self._generators.get(device)
        if found is None:
            found = torch.Generator(device).manual_seed(_SEED + self._world.rank)
            self._generators[device] = found
        return found


class BucketExchange:
    """One bucket's exchange under way, in the place of a collective's work."""

    def __init__(self, compression: Compression, steps: Iterator[Any], job: BucketJob, number: int) -> None:
        self._compression, self._steps = compression, steps
        self._work: Any = None
        self._over = False
        self.job, self.number = job, number
        self.busy_s = 0.0  # seconds that this rank's thread was computing for it
        self.rounds = 0  # operations posted so far, without that for marks
        self._planned = len(compression.method.announced(job))

    @property
    def posts_more(self) -> bool:
        """Whether further operations are to be posted when the last is over."""
        return self.rounds < self._planned

    def advance(self) -> bool:
        """Wait for the operation posted last and compute until the next is posted; False when there is none."""
        if self._over:
            return False
        if self._work is not None:
            self._work.wait()
        begin_s = time.perf_counter()
        with comm.label(f"bucket {self.number}"):
            self._work = next(self._steps, None)
        self.busy_s += time.perf_counter() - begin_s
        self._over = self._work is None
        self.rounds += not self._over
        return not self._over

    def wait(self) -> None:
        """Until the average is there."""
        self._compression.land(self)


def _nbytes(bucket: Bucket) -> int:
    return bucket.numel * bucket.dtype.itemsize


def _matrix(offset: int, numel: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Matrix:
    if not numel or not shape:
        return Matrix(offset, numel, 1)
    _, rows = max(zip(strides, shape, strict=True))
    return Matrix(offset, rows, numel // rows)


def _gaps(bucket: Bucket, flat: torch.Tensor, memory: BucketMemory) -> torch.Tensor:
    """Places of `flat` between and behind the gradients."""
    name = "gaps"
    found = memory.find(name)
    if found is None:
        free = torch.ones(flat.numel(), dtype=torch.bool)
        for place in bucket.places:
            free[place.offset : place.offset + place.numel] = False
        places = free.nonzero().view(-1).to(flat.device)
        found = memory.zeros(name, [len(places)], torch.int64, flat.device)
        found.copy_(places)
    return found
