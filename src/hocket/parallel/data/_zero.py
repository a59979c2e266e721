"""ZeRO stages 1 and 2: gradients are reduce-scattered, each rank updates its shard, and weights are all-gathered."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from hocket.comm import torch_adapter

from ..mesh import World
from ..state import FlatRange, Owned, ParameterPlacement, give_back, memory_order
from ._bucket import Bucket
from ._reducer import GradientReducer
from ._reduction import BucketReduction, average_of
from ._strategy import ShardingStrategy, replicated
from .compression import Compression

_AT_ONCE = 2
"""Reductions under way before a bucket's memory is waited for: one that runs, one behind which to hide."""


class ReduceScatter(BucketReduction):
    """Reductions that leave each rank the average of its own n-th of every bucket.

    If `keep`, buckets keep their memory until the next step, instead of while they are filled and reduced.
    """

    rebuilds = False
    whole = False

    def __init__(self, count: int, world: World, compression: str, *, keep: bool) -> None:
        super().__init__(count, world, compression)
        self.attaches = keep
        self.shards: list[torch.Tensor] = []  # gradients of this rank's part of each bucket
        # of each parameter whether a rank has used it since `forget`
        self.used = torch.zeros(count, dtype=torch.float32)
        self._fresh: list[bool] = []
        self._flying: deque[Bucket] = deque()
        self._spare: dict[Any, list[torch.Tensor]] = {}  # memory of buckets, by element type and device
        self._lent: dict[int, torch.Tensor] = {}  # the same, by the bucket that has it

    def own(self, bucket: Bucket) -> slice:
        """Return the elements of a bucket that this rank owns."""
        each = bucket.numel // self._world.size
        return slice(self._world.rank * each, (self._world.rank + 1) * each)

    def forget(self) -> None:
        """Drop the gradients."""
        self.used.zero_()
        self._fresh = [True] * len(self._buckets)

    def make_bucket(self, members: list[int], parameters: list[torch.nn.Parameter], *, last: bool) -> Bucket:
        """See BucketReduction. A mark of use would reach one rank only: see `settle`."""
        return Bucket(members, parameters, 0, parts=self._world.size, attached=self.attaches)

    def laid_out(self, buckets: list[Bucket]) -> None:
        super().laid_out(buckets)
        self._fresh = [True] * len(buckets)
        if buckets:
            self.used = self.used.to(buckets[0].device)
        self.shards = [
            bucket.flat[self.own(bucket)]
            if self.attaches
            else torch.zeros(bucket.numel // self._world.size, dtype=bucket.dtype, device=bucket.device)
            for bucket in buckets
        ]

    def open(self, bucket: Bucket) -> None:
        if bucket.attached:
            return
        while len(self._flying) >= _AT_ONCE:
            self._land()
        kind = bucket.dtype, bucket.device
        spare = self._spare.setdefault(kind, [])
        if not spare:
            largest = max((b for b in self._buckets if (b.dtype, b.device) == kind), key=lambda b: b.numel)
            spare.append(largest.memory().zero_())
        self._lent[id(bucket)] = spare.pop()
        bucket.attach(self._lent[id(bucket)][: bucket.numel])

    def post(self, bucket: Bucket, number: int, absent: Sequence[int]) -> Any:
        self._flying.append(bucket)
        own = self.own(bucket)
        if self.compression is not None and (exchange := self.compression.post(bucket, number, own=own)):
            return exchange
        operator, last = average_of(bucket, self._world), number == len(self._buckets) - 1
        return torch_adapter.reduce_scatter_single(
            bucket.flat[own], bucket.flat, op=operator, group=self._world.group, async_op=not last
        )

    def settle(self, absent: Sequence[int]) -> Sequence[int]:
        while self._flying:
            self._land()
        used = torch.ones_like(self.used)
        used[absent] = 0
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._world.group)
        self.used = torch.maximum(self.used, used)
        return ()

    def recover(self) -> None:
        self._flying.clear()
        for bucket in self._buckets:
            if not self.attaches and bucket.attached:
                self._close(bucket)

    def _land(self) -> None:
        """Wait for the oldest reduction and, unless buckets keep their memory, add what came and take the memory."""
        bucket = self._flying.popleft()
        bucket.work.wait()
        if self.attaches:
            return
        number = self._buckets.index(bucket)
        mine = bucket.flat[self.own(bucket)]
        if self._fresh[number]:
            self.shards[number].copy_(mine)
        else:
            self.shards[number].add_(mine)
        self._fresh[number] = False
        self._close(bucket)

    def _close(self, bucket: Bucket) -> None:
        bucket.detach()
        self._spare[bucket.dtype, bucket.device].append(self._lent.pop(id(bucket)))


class ShardedOptimizer(ShardingStrategy):
    """Parameters whose gradients and optimizer state are sharded (stages 1 and 2 of ZeRO, Rajbhandari et al. 2020).

    The parameters lie side by side in buckets as their gradients do, and of every bucket each rank owns an n-th,
    whatever parameters that cuts. When the gradients of a bucket are complete it is reduce-scattered while
    back-propagation goes on; the optimizer works on flat views of the rank's own parts; then every bucket's weights are
    all-gathered in place.
    """

    def __init__(
        self,
        # trained parameters by the model's names; all that require a gradient
        parameters: Mapping[str, torch.nn.Parameter],
        frozen: Mapping[str, torch.nn.Parameter],  # parameters that are not trained
        places: Mapping[str, ParameterPlacement],  # where each parameter lies in the model's own
        world: World,  # the ranks
        bucket_bytes: int | None,  # most bytes of a bucket; None to choose by the size of the model
        compression: str = "none",  # compression of the gradients; see `hocket.planner.Plan`
        *,
        # whether whole gradients are kept until the next step (stage 1) instead of a bucket at a time
        keep_gradients: bool,
    ) -> None:
        # What has no elements is in no rank's part of a bucket, and checkpoints must have it all the same.
        kept = {**frozen, **{name: p for name, p in parameters.items() if not p.numel()}}
        super().__init__(frozen=replicated(kept, places, world))
        self._owners: list[tuple[int, Owned, torch.Tensor]] = []  # number of the parameter, and where its gradient is
        self._weights: list[torch.Tensor] = []
        self._views: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # of these, where parameters lie
        self._world, self._parameters = world, list(parameters.values())
        self._scatter = ReduceScatter(len(parameters), world, compression, keep=keep_gradients)
        self._reducer = GradientReducer(
            list(parameters), self._parameters, world, bucket_bytes, None, reduction=self._scatter
        )
        placed = [places[name] for name in parameters]
        for bucket, gradients in zip(self._reducer.buckets, self._scatter.shards, strict=True):
            self._lay_out(bucket, gradients, [placed[i] for i in bucket.members])
            give_back()  # what the parameters lay in; else a model of small tensors is there twice

    @property
    def compression(self) -> Compression | None:
        return self._scatter.compression

    def _lay_out(self, bucket: Bucket, gradients: torch.Tensor, places: list[ParameterPlacement]) -> None:
        """Move the parameters of a bucket into one flat tensor, and note which of it this rank owns."""
        weights = bucket.memory().zero_()
        own = self._scatter.own(bucket)
        for slot, (number, place) in enumerate(zip(bucket.members, places, strict=True)):
            parameter = self._parameters[number]
            view = bucket.cut(weights, slot)
            view.copy_(parameter.detach())
            parameter.data = view
            self._views.append((parameter, view))
            first = bucket.places[slot].offset
            begin, end = max(first, own.start), min(first + parameter.numel(), own.stop)
            if begin >= end:
                continue
            order = tuple(memory_order(view.stride(), view.shape))
            where = FlatRange(place, tuple(view.shape), order, begin - first, end - first)
            leaf = torch.nn.Parameter(weights[begin:end])
            item = Owned(leaf, parameter, where, 1)
            self.owned.append(item)
            self._owners.append((number, item, gradients[begin - own.start : end - own.start]))
        self._weights.append(weights)

    @contextmanager
    def passing(self, last: bool) -> Iterator[None]:
        """See ShardingStrategy. Where gradients are not kept, those of every pass are reduced."""
        reducer = self._reducer
        self._take_back()
        quiet = nullcontext() if last or not self._scatter.attaches else reducer.no_sync()
        with reducer.owning(), quiet, reducer.one_backward():
            yield

    @contextmanager
    def adding(self) -> Iterator[None]:
        self._take_back()
        with self._reducer.owning(), self._reducer.no_sync():
            self._reducer.prepare()
            yield

    def _take_back(self) -> None:
        """Have parameters that the program has given other data (`p.data = ...`) lie in their buckets, with that."""
        for parameter, view in self._views:
            if (
                parameter.data_ptr() != view.data_ptr()
                and parameter.shape == view.shape
                and parameter.dtype == view.dtype
            ):
                parameter.data = view.copy_(parameter.detach())

    def reduce(self) -> None:
        self._reducer.reduce_all()

    def collect(self) -> None:
        used = self._scatter.used.tolist()
        for number, item, gradient in self._owners:
            item.leaf.grad = gradient if used[number] else None

    def publish(self) -> None:
        works = [
            torch_adapter.all_gather_single(
                flat, flat[self._scatter.own(bucket)], group=self._world.group, async_op=True
            )
            for bucket, flat in zip(self._reducer.buckets, self._weights, strict=True)
        ]
        for work in works:
            work.wait()

    def forget(self) -> None:
        super().forget()
        self._scatter.forget()
        for parameter in self._parameters:
            parameter.grad = None
