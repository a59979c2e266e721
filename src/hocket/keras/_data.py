"""Keras' data, shared out: every rank takes its part of every global batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hocket.parallel import DistributedLoader
from hocket.parallel.batches import BatchShard, Cutter, fingerprint
from hocket.parallel.mesh import World

from . import _private

_loaders: weakref.WeakKeyDictionary[Any, DistributedLoader] = weakref.WeakKeyDictionary()


class SharedData(_private.DataAdapter):  # type: ignore[misc]  # Keras carries no types
    """A data adapter of Keras' of which each rank yields its part of each batch.

    The parts are contiguous, in the order of ranks, the first ranks one sample more; a rank without samples in a batch
    yields one all the same, to keep step. The sequence of batches is Keras' own, drawn from the global random
    generators, which stand alike on all ranks.

    Of arrays a rank converts its rows only. torch DataLoaders are shared as by hocket.distribute, so that a rank loads
    its samples only where the data set is loaded by index. Of generators and PyDatasets every rank makes each batch and
    takes its part.

    Args:
        inner: Keras' adapter of the global batches.
        source: what the user gave as `x`.
        world: the ranks.
        note: is told this rank's part as a batch is yielded.
        everyone: the ranks that must have the same data: those of `world`, and those of their pipelines.
    """

    def __init__(
        self, inner: Any, source: Any, world: World, note: Callable[[BatchShard], None], everyone: World
    ) -> None:
        self._inner = inner
        self._world = world
        self._everyone = everyone
        self._note = note
        self._agreed = False
        self._loader: Any = None
        if _private.is_torch_dataloader(source):
            self._loader = _loaders.get(source)
            if self._loader is None:
                self._loader = _loaders[source] = DistributedLoader(source, group=everyone.group, among=world)

    def get_torch_dataloader(self) -> Any:
        """What yields this rank's part of the batches of an epoch."""
        return _Parts(self._begin)

    def _begin(self) -> Iterator[Any]:
        # What draws random numbers draws them where Keras itself would: when the iterator is made.
        if self._loader is not None:
            return self._of_loader()
        loader = self._inner.get_torch_dataloader()
        if isinstance(self._inner, _private.ArrayDataAdapter):
            rows = _Rows(loader.dataset, self._world)
            batches = DataLoader(rows, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)
            return self._of_rows(iter(batches), rows)
        return self._of_batches(iter(loader))

    def _of_loader(self) -> Iterator[Any]:
        for share, part in self._loader._parts():
            self._note(share)
            yield part

    def _of_rows(self, parts: Iterator[Any], rows: _Rows) -> Iterator[Any]:
        for part in parts:
            assert rows.share is not None
            self._note(rows.share)
            yield part

    def _of_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        cutter = Cutter(None)
        for batch in batches:
            if not self._agreed:
                check_alike(fingerprint(batch), self._everyone, "the first batch")
                self._agreed = True
            share = BatchShard.of(cutter.size(batch), self._world.size, self._world.rank)
            self._note(share)
            yield cutter.cut(batch, share.begin, share.end) if share.samples else cutter.cut(batch, 0, 1)

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
        """As Keras' adapter."""
        return self._inner.has_partial_batch

    @property
    def partial_batch_size(self) -> Any:
        """As Keras' adapter."""
        return self._inner.partial_batch_size

    def on_epoch_begin(self) -> None:
        """As Keras' adapter."""
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """As Keras' adapter."""
        self._inner.on_epoch_end()


class _Parts:
    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


class _Rows(Dataset[Any]):
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
    """The user's data as Keras takes it, shared out; a collective operation.

    Args:
        arguments: of Keras' adapters: x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight.
        world: the ranks.
        note: is told this rank's part as a batch is yielded.
        what: the argument that this is, for messages.
        everyone: the ranks that must have the same data.

    Raises:
        ValueError: the ranks have different data.
    """
    source = arguments["x"]
    inner = _private.get_data_adapter(**arguments)
    mark: list[Any] = [type(inner).__name__, inner.num_batches, inner.batch_size]
    if isinstance(inner, _private.ArrayDataAdapter):
        mark += fingerprint(inner._inputs)
    check_alike(mark, everyone, what)
    return SharedData(inner, source, world, note, everyone)


def check_alike(mark: list[Any], world: World, what: str) -> None:
    """Raises ValueError on every rank if the ranks' `mark` differ."""
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
    """This rank's part of one batch of arrays or tensors that every rank holds."""
    whole = _private.tree.map_structure(lambda value: value if value is None else _array(value), batch)
    cutter = Cutter(None)
    share = BatchShard.of(cutter.size(whole), world.size, world.rank)
    return share, cutter.cut(whole, share.begin, share.end) if share.samples else cutter.cut(whole, 0, 1)


def _array(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor) or hasattr(value, "shape") else torch.as_tensor(value)
