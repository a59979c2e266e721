"""Keras' data, sharded: every rank takes its part of every global batch, and rows are gathered back."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hocket import comm
from hocket.comm import torch_adapter
from hocket.parallel import DistributedLoader
from hocket.parallel.batches import BatchShard, Cutter, fingerprint
from hocket.parallel.mesh import World

from . import _private

_loaders: weakref.WeakKeyDictionary[Any, DistributedLoader] = weakref.WeakKeyDictionary()


class SharedData(_private.DataAdapter):  # type: ignore[misc]  # Keras carries no types
    """A data adapter of Keras' of which each rank yields its part of each batch.

    The parts are contiguous, in the order of ranks, the first ranks one sample more; a rank without samples in a batch
    yields one all the same, to keep step. The sequence of batches is Keras' own, drawn from the global random
    generators, which are in the same state on all ranks.

    Of arrays a rank converts its rows only. torch DataLoaders are shared as by hocket.distribute, so that a rank loads
    its samples only where the data set is loaded by index. Of generators and PyDatasets every rank makes each batch and
    takes its part. `inner` is Keras' adapter of the global batches, and `source` what the user gave as `x`. `note` is
    told this rank's part as a batch is yielded; the ranks of `everyone`, those of `world` and of their pipelines, must
    have the same data.
    """

    def __init__(
        self, inner: Any, source: Any, world: World, note: Callable[[BatchShard], None], everyone: World
    ) -> None:
        self._inner = inner
        self._world = world
        self._everyone = everyone
        self._note = note
        self._loader: Any = None
        if _private.is_torch_dataloader(source):
            before = self._loader = _loaders.get(source)
            if before is None or not before.is_among(world):
                self._loader = _loaders[source] = DistributedLoader(source, group=everyone.group, among=world)
                if before is not None:  # of a model that is parallel in another way
                    self._loader.resume(before.position())

    def get_torch_dataloader(self) -> Any:
        """Return what yields this rank's part of the batches of an epoch."""
        return _EpochBatches(self._begin)

    def _begin(self) -> Iterator[Any]:
        # What draws random numbers draws them where Keras itself would: when the iterator is made.
        if self._loader is not None:
            if self._loader.loader.generator is None:
                torch.empty((), dtype=torch.int64).random_()  # torch's own iterator draws its workers' seed so
            return self._of_loader()
        loader = self._inner.get_torch_dataloader()
        if isinstance(self._inner, _private.ArrayDataAdapter):
            rows = _ShardedArrays(loader.dataset, self._world)
            batches = DataLoader(rows, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)
            return self._of_rows(iter(batches), rows)
        return self._of_batches(iter(loader))

    def _of_loader(self) -> Iterator[Any]:
        for share, part in self._loader._parts():
            self._note(share)
            yield part

    def _of_rows(self, parts: Iterator[Any], rows: "_ShardedArrays") -> Iterator[Any]:
        for part in parts:
            assert rows.share is not None
            self._note(rows.share)
            yield part

    def _of_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        cutter, agreed = Cutter(None), False
        for batch in batches:
            if not agreed:  # in each epoch: an order may be drawn anew where one ends
                check_same(fingerprint(batch), self._everyone, "the first batch")
                agreed = True
            share = BatchShard.of(cutter.size(batch), self._world.size, self._world.rank)
            self._note(share)
            yield cutter.cut(batch, share.begin, share.end) if share.samples else cutter.cut(batch, 0, 1)

    @property
    def repeatable(self) -> bool:
        """Whether another process can take up the sequence of batches where this one has left it."""
        return self._loader is not None or isinstance(self._inner, _private.ArrayDataAdapter)

    @property
    def of_arrays(self) -> bool:
        """Whether it was given as arrays."""
        return isinstance(self._inner, _private.ArrayDataAdapter)

    def position(self) -> Any:
        """Return where the sequence stands besides the global random numbers."""
        return None if self._loader is None else self._loader.position()

    def resume(self, position: Any) -> None:
        """Go on there."""
        if self._loader is not None:
            self._loader.resume(position)

    @property
    def num_batches(self) -> Any:
        """Of an epoch, where it is known."""
        return self._inner.num_batches

    @property
    def batch_size(self) -> Any:
        """The global one, where it is known."""
        return self._inner.batch_size

    @property
    def has_partial_batch(self) -> Any:
        return self._inner.has_partial_batch

    @property
    def partial_batch_size(self) -> Any:
        return self._inner.partial_batch_size

    def on_epoch_begin(self) -> None:
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._inner.on_epoch_end()


class _EpochBatches:
    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


class _ShardedArrays(Dataset[Any]):
    """Keras' data set of arrays, asked for whole batches of indices and giving this rank's rows."""

    def __init__(self, dataset: Any, world: World) -> None:
        self._dataset = dataset
        self._world = world
        self.share: BatchShard | None = None

    def __getitems__(self, indices: list[int]) -> Any:
        self.share = share = BatchShard.of(len(indices), self._world.size, self._world.rank)
        return self._dataset.__getitems__(indices[share.begin : share.end] if share.samples else indices[:1])

    def __len__(self) -> int:
        return len(self._dataset)


def shared(
    arguments: dict[str, Any], world: World, note: Callable[[BatchShard], None], *, what: str = "x", everyone: World
) -> SharedData:
    """Return the user's data as Keras takes it, shared out; a collective operation.

    `arguments` are those of Keras' adapters, x, y and so on; messages call them `what`. `note` is told this rank's part
    as a batch is yielded; the ranks of `everyone` must have the same data.

    Raises:
        ValueError: the ranks have different data.
    """
    source = arguments["x"]
    inner = _private.get_data_adapter(**arguments)
    mark: list[Any] = [type(inner).__name__, inner.num_batches, inner.batch_size]
    if isinstance(inner, _private.ArrayDataAdapter):
        mark += fingerprint(inner._inputs)
    check_same(mark, everyone, what)
    return SharedData(inner, source, world, note, everyone)


def check_same(mark: list[Any], world: World, what: str) -> None:
    """Raise ValueError on every rank if the ranks' `mark` differ."""
    for rank, other in enumerate(marks := world.from_all(mark)):
        if repr(other) != repr(marks[0]):
            raise ValueError(
                f"{what} on rank {rank} is not that of rank 0 ({_brief(other)} and {_brief(marks[0])}). Give every "
                "rank the same, whole data, and seed what draws random numbers of its own: hocket shares batches out"
            )


def _brief(mark: list[Any]) -> str:
    text = repr(mark)
    return text if len(text) <= 100 else text[:97] + "..."


def cut_batch(batch: Any, world: World) -> tuple[BatchShard, Any]:
    """Return this rank's part of one batch of arrays or tensors that every rank holds."""
    whole = _private.tree.map_structure(lambda value: value if value is None else _array(value), batch)
    cutter = Cutter(None)
    share = BatchShard.of(cutter.size(whole), world.size, world.rank)
    return share, cutter.cut(whole, share.begin, share.end) if share.samples else cutter.cut(whole, 0, 1)


def _array(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor) or hasattr(value, "shape") else torch.as_tensor(value)


def gathered(rows: torch.Tensor, share: BatchShard, world: World) -> torch.Tensor:
    """Return all rows of a batch, in its order, on every rank; a collective operation.

    Args:
        rows: This rank's rows, along the first axis; a row that is there only to keep step is left out.
        share: This rank's part of the batch.
        world: The ranks.
    """
    if world.size == 1:
        return rows.detach()
    if rows.dtype is torch.bool:
        return gathered(rows.view(torch.uint8), share, world).view(torch.bool)
    most = -(-share.total // world.size)
    mine = rows.detach()[: share.samples]
    if share.samples < most:
        mine = torch.cat([mine, mine.new_zeros((most - share.samples, *mine.shape[1:]))])
    whole = mine.new_empty((world.size * most, *mine.shape[1:]))
    with comm.label("keras rows"):
        torch_adapter.all_gather_single(whole.view(-1), mine.contiguous().view(-1), group=world.group)
    if most * world.size == share.total:
        return whole
    parts = [BatchShard.of(share.total, world.size, rank).samples for rank in range(world.size)]
    return torch.cat([whole[rank * most : rank * most + count] for rank, count in enumerate(parts)])


class _GatherRows(torch.autograd.Function):
    """Like `gathered`; the gradient of the own rows goes back, `factor` times, without another exchange.

    Every rank computes the same loss of the whole batch, so that what other ranks would send is known here already.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, share: BatchShard, world: World, factor: float) -> torch.Tensor:
        ctx.share, ctx.factor, ctx.shape = share, factor, rows.shape
        return gathered(rows, share, world)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        share: BatchShard = ctx.share
        mine = gradient.new_zeros(ctx.shape)
        mine[: share.samples] = gradient[share.begin : share.end] * ctx.factor
        return mine, None, None, None


def gathered_with_gradient(rows: torch.Tensor, share: BatchShard, world: World, factor: float) -> torch.Tensor:
    """Like `gathered`, and the gradient with respect to the own rows is `factor` times that of the result's."""
    if world.size == 1:
        return rows
    if not rows.requires_grad:
        return gathered(rows, share, world)
    whole: torch.Tensor = _GatherRows.apply(rows, share, world, factor)  # type: ignore[no-untyped-call]
    return whole
