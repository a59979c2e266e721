"""The data set and the batch sampler that a rank's inner DataLoader works with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from . import _rng
from ._batch_shard import BatchShard
from ._collated import Shown, look_at_collating
from ._generators import OwnGenerators, state_of
from ._ragged_samples import RaggedSamples
from ._rng import RandomStream
from ._workers import opened

Key = tuple[int, Any, int]
"""How a sample is asked for: epoch, the sampler's index, and the sample's place in the epoch's sequence."""

_OWN = ("_dataset", "_seed", "_first", "_generators", "_looks")
_END = object()


class SeededDataset(Dataset[Any]):
    """A map-style data set whose random augmentation depends on seed, epoch and place in the sequence only.

    So it does not depend on which rank or which worker process loads the sample. Generators that the data set has of
    its own (a `numpy.random.default_rng` in a transform) are seeded as the global ones are. Everything else that is
    asked of it, it passes on to the user's data set. `seed` is common to all ranks; None to load without seeding.
    """

    _first: Key | None  # that was asked for last
    _looks: bool  # whether it was for the first batch
    _generators: OwnGenerators

    def __init__(self, dataset: Any, seed: int | None) -> None:
        object.__setattr__(self, "_dataset", dataset)
        object.__setattr__(self, "_seed", None if is_deterministic(dataset) else seed)
        object.__setattr__(self, "_first", None)
        object.__setattr__(self, "_looks", False)
        object.__setattr__(self, "_generators", OwnGenerators(dataset))

    def __getitems__(self, keys: Sequence[Key]) -> Sequence[Any]:
        dataset, seed = self._dataset, self._seed
        many = getattr(dataset, "__getitems__", None)
        object.__setattr__(self, "_first", keys[0])
        object.__setattr__(self, "_looks", isinstance(keys, _FirstKeys))
        if seed is None:
            indices = [index for _, index, _ in keys]
            return many(indices) if callable(many) else [dataset[i] for i in indices]
        samples: list[Any] = []
        own = self._generators.of(keys[0][0])
        with _rng.restored(own):
            for epoch, index, place in keys:
                _rng.seed_everything(_rng.mix(seed, epoch, place), own)
                samples.extend(many([index]) if callable(many) else (dataset[index],))
        return samples

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not there yet: being unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class SeededCollate:
    """A function that makes batches of samples, and draws random numbers by the place of the first sample alone.

    Args:
        collate: The user's.
        dataset: What has loaded the samples, in the same process.
        seed: Seed that is common to all ranks.
        parts: Whether these are parts of batches that ranks train with together.
    """

    def __init__(self, collate: Callable[[Any], Any], dataset: SeededDataset, seed: int, *, parts: bool) -> None:
        self._collate, self._generators = collate, OwnGenerators(collate)
        self._dataset = dataset
        self._seed = seed
        self._ragged = RaggedSamples(parts)

    def __call__(self, samples: Any) -> Any:
        """Return the batch; a `Shown` of the first one, and of others in which samples are padded."""
        if not self._ragged.looks:
            return self._drawing(samples)[0]
        spare, first = self._ragged.take(samples), self._dataset._looks
        shown = look_at_collating(self._drawing, samples) if first else Shown(self._drawing(samples)[0], None)
        if shown.alone is None and not shown.mixed:
            shown = shown._replace(alone=self._ragged.alone(lambda some: self._drawing(some)[0], spare, shown.batch))
        return shown if first or shown.alone is not None else shown.batch

    def _drawing(self, samples: Any) -> tuple[Any, bool]:
        assert self._dataset._first is not None
        epoch, _, place = self._dataset._first
        own = self._generators.of(epoch)
        with _rng.restored(own):
            _rng.seed_everything(_rng.mix(self._seed, epoch, place, 0), own)
            before = self._states(own) if self._dataset._looks else ""
            batch = self._collate(samples)
            return batch, self._dataset._looks and before != self._states(own)

    def _states(self, own: Any) -> str:
        torch_state, *others = _rng.RngStates.now()
        return repr((torch_state.tolist(), others, [state_of(one) for one in own]))


def is_deterministic(dataset: Any) -> bool:
    """Return whether `dataset` is of a kind known to draw no random numbers, so that seeding would only cost time."""
    if type(dataset) is Subset:
        return is_deterministic(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(is_deterministic(part) for part in dataset.datasets)
    return type(dataset) in (TensorDataset, list, tuple, range)


class _FirstKeys(list[Key]):
    """Those of the first batch that a loader gives."""


class RankSampler:
    """This rank's part of each batch of the user's batch sampler, as keys.

    The sampler itself runs equally on every rank, drawing from `stream`. What this rank takes of its batches is noted
    in `shares`, with all indices of the batch, for whoever receives the loaded batches in the same order.

    Args:
        batches: The user's batch sampler.
        stream: The random numbers that the sampler draws.
        world: How many ranks share a batch.
        rank: This rank's number.
        keep_step: Whether a rank without samples in a batch gets one of the batch's all the same (to weigh nothing), so
            that all ranks make the same number of steps; else it skips the batch.
        agree: A function that is given the very first batch, to compare it with other ranks'.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        stream: RandomStream,
        world: int,
        rank: int,
        *,
        keep_step: bool,
        agree: Callable[[Any], None],
    ) -> None:
        self.epoch = 0
        self.shares: deque[tuple[BatchShard, list[Any]]] = deque()
        self.skip = 0  # batches to leave out at the beginning
        self.skipped: list[Any] = []  # the last of them
        self._begun: Iterator[Any] | None = None
        self._batches = batches
        self._stream = stream
        self._world = world
        self._rank = rank
        self._keep_step = keep_step
        self._agree: Callable[[Any], None] | None = agree
        self._kind: type[list[Key]] = _FirstKeys if world > 1 else list

    @property
    def gives_parts(self) -> bool:
        """Whether ranks train together, each with a part of a batch."""
        return self._keep_step and self._world > 1

    def begin(self) -> None:
        """Begin an epoch of the user's sampler, which may draw random numbers now, or with its first batch."""
        self._begun = iter(self._batches)

    def __iter__(self) -> Iterator[list[Key]]:
        begun, self._begun = self._begun, None
        return self._run(self.epoch, self.shares, self.skip, self._batches if begun is None else begun)

    def _run(
        self, epoch: int, shares: deque[tuple[BatchShard, list[Any]]], skip: int, batches: Iterable[Any]
    ) -> Iterator[list[Key]]:
        agree, self._agree = self._agree, None
        place = 0
        for number, batch in enumerate(each(batches, self._stream, agree)):
            indices = list(batch)
            if number < skip:
                place += len(indices)
                self.skipped = indices
                continue
            share = BatchShard.of(len(indices), self._world, self._rank)
            begin, end = share.begin, share.end
            if begin == end and self._keep_step and indices:
                begin, end = 0, 1
            if begin < end:
                shares.append((share, indices))
                kind, self._kind = self._kind, list
                yield kind((epoch, indices[i], place + i) for i in range(begin, end))
            place += len(indices)


def each(items: Iterable[Any], stream: RandomStream, agree: Callable[[Any], None] | None) -> Iterator[Any]:
    """Return the items, each drawn with `stream` as the source of random numbers; the first is shown to `agree`."""
    with stream:
        iterator = opened(items)
    while True:
        with stream:
            item = next(iterator, _END)
        if agree is not None:
            agree(None if item is _END else item)
            agree = None
        if item is _END:
            return
        yield item
