"""Each rank updates its part of the weights: gradients are reduce-scattered, the updated weights all-gathered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from hocket.comm import torch_adapter

from ..mesh import World
from ..state import (
    FlatRange,
    Owned,
    ParameterPlacement,
    ShardBox,
    memory_order,
)
from ._bucket import Bucket
from ._reducer import Reducer

_AT_ONCE = 2
"""Reductions under way before a bucket's memory is waited for: one that runs, one behind which to hide."""


class Scattered(Reducer):
    """Parameters whose gradients and optimizer state are divided (stages 1 and 2 of ZeRO, Rajbhandari et al. 2020).

    The parameters lie side by side in buckets as their gradients do, and of every bucket each rank owns an n-th,
    whatever parameters that cuts. When the gradients of a bucket are complete it is reduce-scattered while
    back-propagation goes on; the optimizer works on flat views of the rank's own parts; then every bucket's weights are
    all-gathered in place.

    Args:
        parameters: by the model's names; all that require a gradient.
        frozen: parameters that do not.
        places: where each lies in the model's own parameter.
        world: the ranks.
        bucket_bytes: most bytes of a bucket; None to choose by the size of the model.
        compression: of the gradients; see `hocket.planner.Plan`.
        keep_gradients: whether whole gradients are kept until the next step (stage 1) instead of a bucket at a time.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        frozen: Mapping[str, torch.nn.Parameter],
        places: Mapping[str, ParameterPlacement],
        world: World,
        bucket_bytes: int | None,
        compression: str = "none",
        *,
        keep_gradients: bool,
    ) -> None:
        self._keep = keep_gradients
        self._built = False
        self._flying: deque[Bucket] = deque()
        self._spare: dict[Any, list[torch.Tensor]] = {}  # memory of buckets, by element type and device
        self._lent: dict[int, torch.Tensor] = {}  # the same, by the bucket that has it
        self.owned: list[Owned] = []
        self.frozen = [Owned(p, p, ShardBox.all_of(places[name]), world.size) for name, p in frozen.items()]
        self._owners: list[tuple[int, Owned, torch.Tensor]] = []  # number of the parameter, and where its gradient is
        super().__init__(list(parameters), list(parameters.values()), world, bucket_bytes, None, compression)
        self._seen = None  # the order of the buckets cannot be changed once their parts have owners
        self._fresh = [True] * len(self.buckets)
        self._used = torch.zeros(len(self._parameters), dtype=torch.float32, device=self._device())
        self._weights: list[torch.Tensor] = []
        self._parts: list[torch.Tensor] = []  # of the gradients, this rank's own
        for bucket in self.buckets:
            self._lay_out(bucket, [places[self._names[i]] for i in bucket.members])

    def _device(self) -> torch.device:
        return self.buckets[0].device if self.buckets else torch.device("cpu")

    def _lay_out(self, bucket: Bucket, places: list[ParameterPlacement]) -> None:
        """Moves the parameters of a bucket into one flat tensor, and notes which of it this rank owns."""
        weights = bucket.memory().zero_()
        own = self._own(bucket)
        gradients = bucket.flat[own] if self._keep else weights.new_zeros(own.stop - own.start)
        for slot, (number, place) in enumerate(zip(bucket.members, places, strict=True)):
            parameter = self._parameters[number]
            view = bucket.cut(weights, slot)
            view.copy_(parameter.detach())
            parameter.data = view
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
        self._parts.append(gradients)

    def _own(self, bucket: Bucket) -> slice:
        each = bucket.numel // self._world.size
        return slice(self._world.rank * each, (self._world.rank + 1) * each)

    # --- buckets ----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        if self._built:
            raise RuntimeError(
                "parameters were frozen, thawed or converted after their optimizer state had been divided among ranks; "
                "do it before the Trainer is made, or make a new one"
            )
        self._built = True
        super()._build()

    def _make_bucket(self, members: list[int], last: bool) -> Bucket:
        parameters = [self._parameters[i] for i in members]
        return Bucket(members, parameters, 0, parts=self._world.size, attached=self._keep)

    def _mark_used(self, tail: torch.Tensor) -> None:
        pass  # a scattered mark would reach one rank only: see _settle

    def _open(self, bucket: Bucket) -> None:
        if bucket.attached:
            return
        while len(self._flying) >= _AT_ONCE:
            self._land()
        kind = bucket.dtype, bucket.device
        spare = self._spare.setdefault(kind, [])
        if not spare:
            largest = max((b for b in self.buckets if (b.dtype, b.device) == kind), key=lambda b: b.numel)
            spare.append(largest.memory().zero_())
        self._lent[id(bucket)] = spare.pop()
        bucket.attach(self._lent[id(bucket)][: bucket.numel])

    def _close(self, bucket: Bucket) -> None:
        bucket.detach()
        self._spare[bucket.dtype, bucket.device].append(self._lent.pop(id(bucket)))

    def _adopt(self, number: int, parameter: torch.Tensor) -> None:
        super()._adopt(number, parameter)
        if not self._keep:
            parameter.grad = None

    def _post(self, bucket: Bucket, last: bool) -> Any:
        if self.compression is not None:
            exchange = self.compression.post(bucket, self._next, own=self._own(bucket))
            if exchange is not None:
                self._flying.append(bucket)
                return exchange
        operator = dist.ReduceOp.AVG
        if bucket.flat.dtype is torch.float16:  # a sum may be beyond its range where the average is not
            bucket.flat.div_(self._world.size)
            operator = dist.ReduceOp.SUM
        self._flying.append(bucket)
        mine = bucket.flat[self._own(bucket)]
        return torch_adapter.reduce_scatter_single(
            mine, bucket.flat, op=operator, group=self._world.group, async_op=not last
        )

    def _land(self) -> None:
        """Waits for the oldest reduction and, unless gradients are kept, adds what came and gives its memory back."""
        bucket = self._flying.popleft()
        bucket.work.wait()
        if self._keep:
            return
        number = self.buckets.index(bucket)
        mine = bucket.flat[self._own(bucket)]
        if self._fresh[number]:
            self._parts[number].copy_(mine)
        else:
            self._parts[number].add_(mine)
        self._fresh[number] = False
        self._close(bucket)

    def _settle(self) -> None:
        while self._flying:
            self._land()
        used = torch.ones_like(self._used)
        if self._absent:
            used[self._absent] = 0
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._world.group)
        self._used = torch.maximum(self._used, used)

    def _recover(self) -> None:
        super()._recover()
        self._flying.clear()
        for bucket in self.buckets:
            if not self._keep and bucket.attached:
                self._close(bucket)

    # --- a form of data parallelism ---------------------------------------------------------------------------------

    @contextmanager
    def passing(self, last: bool) -> Iterator[None]:
        """See Form. Where gradients are not kept, those of every pass are reduced."""
        with nullcontext() if last or not self._keep else self.no_sync():
            self.prepare()
            yield

    @contextmanager
    def adding(self) -> Iterator[None]:
        """See Form."""
        with self.no_sync():
            self.prepare()
            yield

    def reduce(self) -> None:
        """See Form."""
        self.reduce_all()

    def collect(self) -> None:
        """See Form."""
        used = self._used.tolist()
        for number, item, gradient in self._owners:
            item.leaf.grad = gradient if used[number] else None

    def publish(self) -> None:
        """See Form."""
        works = [
            torch_adapter.all_gather_single(flat, flat[self._own(bucket)], group=self._world.group, async_op=True)
            for bucket, flat in zip(self.buckets, self._weights, strict=True)
        ]
        for work in works:
            work.wait()

    def forget(self) -> None:
        """See Form."""
        self._used.zero_()
        self._fresh = [True] * len(self.buckets)
        for parameter in self._parameters:
            parameter.grad = None
        for item in self.owned:
            item.leaf.grad = None
