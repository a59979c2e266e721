"""Batches for workers of different speed: each takes the next part of the sequence when it is ready for it."""

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hocket.comm import torch_adapter

from ...batches import (
    BatchShard,
    Cutter,
    Key,
    RandomStream,
    RankSampler,
    SharedLoader,
    each,
    expected_size,
    inner_loader,
)
from ...mesh import World


class Tickets:
    """Numbers 0, 1, 2, ... of each epoch, each given to one worker; counted in the store of torch's default group.

    To make them is a collective operation of the workers.
    """

    def __init__(self, world: World) -> None:
        self._store = torch_adapter.default_store() if world.size > 1 else None
        self._name = f"hocket/tickets/{world.from_root(secrets.token_hex(8))}"
        self._taken = 0
        self._epoch = -1

    def take(self, epoch: int) -> int:
        """Return the next number of an epoch."""
        if self._store is not None:
            return int(self._store.add(f"{self._name}/{epoch}", 1)) - 1
        if epoch != self._epoch:
            self._epoch, self._taken = epoch, 0
        self._taken += 1
        return self._taken - 1


class TicketLoader(SharedLoader):
    """A loader that gives out parts of the user's batches by tickets: part t is the (t mod n)-th n-th of batch t / n.

    All workers together see every sample once in an epoch, as with `DistributedLoader`, and the sequence of batches is
    that of one process; but a worker that is slow gets fewer parts, and workers end the epoch at most one part apart.
    Workers that load in the background (`num_workers`) take tickets as far ahead as they load.
    """

    _keep_step = False

    def __init__(self, loader: Iterable[Any], world: World, tickets: Tickets) -> None:
        super().__init__(loader, among=world)
        self._tickets = tickets
        self.share: BatchShard | None = None

    def __iter__(self) -> Iterator[tuple[BatchShard, Any]]:
        yield from self._parts()

    def position(self) -> dict[str, Any]:
        """See SharedLoader; workers meet at the ends of epochs only, so that the beginning of one is all there is."""
        self._begun = 0
        return super().position()

    def _start(self) -> Any:
        agree = super()._start()
        if self._by_index:
            loader: Any = self.loader
            assert self._stream is not None
            seed = self._seed if self._seed_samples else None
            self._sampler = TicketSampler(loader.batch_sampler, self._stream, self._among, self._tickets, agree=agree)
            self._inner = inner_loader(loader, seed, self._sampler, self._worker_generator)
        return agree

    def _cut_parts(self, stream: RandomStream, agree: Any) -> Iterator[tuple[BatchShard, Any]]:
        cutter = Cutter(expected_size(self.loader))
        batches = each(self.loader, stream, agree)
        for batch, _, share in _taken(batches, cutter.size, self._tickets, self._position - 1, self._among.size):
            yield share, cutter.cut(batch, share.begin, share.end)


class TicketSampler(RankSampler):
    """Like RankSampler, for the parts that tickets give.

    `agree` is given the very first batch, to compare it with other workers'.
    """

    def __init__(
        self, batches: Iterable[Any], stream: RandomStream, world: World, tickets: Tickets, *, agree: Any
    ) -> None:
        super().__init__(batches, stream, world.size, world.rank, keep_step=False, agree=agree)
        self._tickets = tickets

    def _run(
        self, epoch: int, shares: deque[tuple[BatchShard, list[Any]]], skip: int, batches: Iterable[Any]
    ) -> Iterator[list[Key]]:
        agree, self._agree = self._agree, None
        batches = map(list, each(batches, self._stream, agree))
        for indices, place, share in _taken(batches, len, self._tickets, epoch, self._world):
            shares.append((share, indices))
            yield [(epoch, indices[i], place + i) for i in range(share.begin, share.end)]


def _taken(
    batches: Iterable[Any], size_of: Callable[[Any], int], tickets: Tickets, epoch: int, world: int
) -> Iterator[tuple[Any, int, BatchShard]]:
    """Yield the batches of which tickets give this worker a part, the samples before each, and the part."""
    before, mine = 0, None
    for number, batch in enumerate(batches):
        size = size_of(batch)
        mine = tickets.take(epoch) if mine is None else mine
        while mine // world == number:
            share = BatchShard.of(size, world, mine % world)
            if share.samples:
                yield batch, before, share
            mine = tickets.take(epoch)
        before += size
