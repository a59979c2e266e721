"""How the buckets of a reducer are reduced: by all-reduce, unless ZeRO shards them (`_zero.py`)."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..mesh import World
from ._bucket import Bucket
from .compression import Compression


class BucketReduction:
    """How a reducer's buckets are reduced: here by all-reduce, after which every rank has the whole average in place.

    `GradientReducer` knows when a bucket is complete and whose turn it is. This says what memory a bucket has, what is
    posted, and what becomes of the result.

    Behind the gradients the last bucket carries one element for each parameter that says whether this rank used it.
    """

    rebuilds = True  # whether buckets may be laid out anew
    attaches = True  # whether a parameter's `.grad` is a view of its bucket until the next step
    whole = True  # whether every rank has the average of whole gradients in the end

    def __init__(self, count: int, world: World, compression: str) -> None:
        self.compression = None if compression == "none" else Compression(compression, world)
        self._count = count
        self._world = world
        self._buckets: list[Bucket] = []

    def make_bucket(self, members: list[int], parameters: list[torch.nn.Parameter], *, last: bool) -> Bucket:
        """Make the bucket of some parameters. It gets memory with its first gradient: that of old buckets, if any."""
        return Bucket(members, parameters, self._count if last else 0, attached=False)

    def laid_out(self, buckets: list[Bucket]) -> None:
        """Take over all buckets, which have been made."""
        self._buckets = buckets
        if self.compression is not None:
            self.compression.rebuilt(buckets)

    def open(self, bucket: Bucket) -> None:
        """Get memory for `bucket`, into which a gradient is about to go."""
        bucket.open()

    def post(self, bucket: Bucket, number: int, absent: Sequence[int]) -> Any:
        """Post the reduction of a complete bucket, the `number`-th; `absent` are the parameters without a gradient."""
        last = number == len(self._buckets) - 1
        if last:
            bucket.tail.fill_(1)
            bucket.tail[absent] = 0
        if self.compression is not None and (exchange := self.compression.post(bucket, number)):
            return exchange
        # Nothing is left to hide the last one behind: it may run on this thread.
        return dist.all_reduce(
            bucket.flat, op=average_of(bucket, self._world), group=self._world.group, async_op=not last
        )

    def settle(self, absent: Sequence[int]) -> Sequence[int]:
        """Wait for all reductions; return those of `absent` that have a gradient here because other ranks used them."""
        for bucket in self._buckets:
            bucket.work.wait()
        used = self._buckets[-1].tail.tolist() if absent else []
        return [i for i in absent if used[i]]

    def recover(self) -> None:
        """Forget a back-propagation that was left by an exception; what it had posted is over."""


def average_of(bucket: Bucket, world: World) -> Any:
    """Return the operator that averages a bucket; divide it first where a sum may leave the range of its type."""
    if bucket.dtype is not torch.float16:
        return dist.ReduceOp.AVG
    bucket.flat.div_(world.size)
    return dist.ReduceOp.SUM
