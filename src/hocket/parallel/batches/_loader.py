"""Loaders whose batch size is global: each rank gets its part of every batch that one device would get."""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from hocket._program import warn
from hocket.profile import loading

from ..mesh import World, in_turn
from ..mesh import world as _world
from . import _batch_shard
from . import batch as _batch
from ._batch_shard import BatchShard
from ._collated import Alone, Shown
from ._cut import Cutter
from ._generators import own_generators, put_back_generators, state_of
from ._loss_form import number
from ._packed import Packed
from ._rng import RandomStream, RngStates, mix
from ._samples import RankSampler, SeededDataset, each, is_deterministic
from ._user_loader import (
    draw_worker_seed,
    expected_size,
    generators,
    inner_loader,
    loads_by_index,
    refuse_divided_sampler,
    samplers,
)
from ._workers import opened
from .trees import tensors_in

_loaders: weakref.WeakSet[SharedLoader] = weakref.WeakSet()


class SharedLoader:
    """What loaders for training and for evaluation have in common: the same batches on every rank, and a rank's part.

    Args:
        loader: A torch DataLoader or any iterable of batches, the same on every rank.
        group: The ranks that share each batch; None for torch's default group.
        seed_samples: Whether each sample is loaded with the global random generators seeded by its place.
        among: The ranks that divide each batch, if not all of the group do: others get the same parts as one of them.
        stream: Which of several loaders that are used together this is: they shuffle by random numbers of their own.
            None: the first, and beside loaders under way that began with the same random state the next one.
    """

    _keep_step = True

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        group: Any = None,
        seed_samples: bool = True,
        among: World | None = None,
        stream: int | None = None,
    ) -> None:
        self.loader = loader
        self._number = stream
        self._shuffles_by: tuple[bytes, int] | None = None  # the random state when the first iteration began, and that
        self.under_way = False  # whether an iteration has begun and is not over
        self.world = _world.current(group)
        self._among = among or self.world
        self._begun = 0  # batches of this iteration that have been asked for
        self._skip = 0  # batches to leave out at the beginning of the next iteration
        self._given: Any = None  # random state to begin with, other than rank 0's
        self._at: Any = None  # an epoch, and the random state at its beginning, where no index tells what is drawn
        self._last: Any = None  # tells the batch that was yielded last
        self._mark: int | None = None  # of the last batch to leave out, as the run before saw it
        self._left = False  # whether the program has left the iteration before the last batch
        self._leaves = False  # whether it had left the one before, too, and begun a new epoch then
        self._seed_samples = seed_samples
        self._by_index = loads_by_index(loader)
        self._packed: Packed | None = None  # a sample of it by itself, where all of them are packed into one row
        self._alone: Alone | None = None  # some samples of the latest batch as they are without the others
        self._upcoming = 0  # the epoch that the next iteration is to be
        self._position = 0  # the epoch for which the random numbers stand ready
        self._stream: RandomStream | None = None
        self.process_seed: int | None = None  # of this process, when the first iteration began
        refuse_divided_sampler(loader)
        _loaders.add(self)

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The number of the next iteration over the loader, from 0."""
        return self._upcoming

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`, as it would be in an uninterrupted run: for resuming.

        Random numbers of the epochs between are drawn and dropped; that is exact for data sets that are loaded by
        index. A sampler with a `set_epoch` of its own is told too.
        """
        self._upcoming = epoch
        for sampler in samplers(self.loader):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet: being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    # --- one epoch --------------------------------------------------------------------------------------------------

    def _parts(self) -> Iterator[tuple[BatchShard, Any]]:
        """Return this rank's part of each batch of the next epoch."""
        self._leaves, self._left = self._left, False
        ended, self.under_way = False, True
        try:
            yield from self._next_epoch()
            ended = True
        finally:
            self._left, self.under_way = not ended, False

    def _next_epoch(self) -> Iterator[tuple[BatchShard, Any]]:
        agree = self._start() if self._stream is None else None
        assert self._stream is not None
        if self._upcoming != self._position:
            self._seek(self._stream)
        epoch = self._position
        self._at = self._here()
        self._position = self._upcoming = epoch + 1
        if not self._by_index:
            yield from self._cut_parts(self._stream, agree)
            return
        self._sampler.epoch = epoch
        self._sampler.skip = self._begun = self._take_skip()
        self._sampler.shares = shares = deque[tuple[BatchShard, list[Any]]]()
        with self._stream:
            self._sampler.begin()  # before the seed is drawn, as torch does
            self._worker_generator.manual_seed(mix(draw_worker_seed(self.loader, epoch), self._among.rank))
        for part in opened(self._inner):
            if isinstance(part, Shown):
                self._alone, self._packed = part.alone, part.packed
                if part.mixed is not None and self._keep_step:
                    mixed = any(self.world.from_all(part.mixed))
                    if mixed and self.world.rank == 0:
                        warn(_MIXED)
                part = part.batch
            self._begun += 1
            self._compare(self._sampler.skipped)
            share, self._last = shares.popleft()
            yield share, part
        self._begun = 0

    def _cut_parts(self, stream: RandomStream, agree: Any) -> Iterator[tuple[BatchShard, Any]]:
        cutter = Cutter(expected_size(self.loader))
        skip, self._begun = self._take_skip(), 0
        for batch in each(self.loader, stream, agree):
            self._begun += 1
            if not any(tensor.is_cuda for tensor in tensors_in(batch)):  # a look there would wait for the device
                self._last = _batch_shard.fingerprint(batch)
            if self._begun <= skip:
                if self._begun == skip:
                    self._compare(self._last)
                continue
            if self._among.size == 1:
                yield BatchShard(0, 1, 1, 1), batch
                continue
            share = BatchShard.of(cutter.size(batch), self._among.size, self._among.rank)
            if share.samples:
                yield share, cutter.cut(batch, share.begin, share.end)
            elif self._keep_step and share.total:
                yield share, cutter.cut(batch, 0, 1)
        self._begun = 0

    def _leave(self) -> None:
        """Note that it yields no more, unless the interpreter has ended, and with it the modules that take note."""
        leave = getattr(_batch, "leave", None)
        if leave is not None:
            leave(self, early=self._left)

    # --- where it stands --------------------------------------------------------------------------------------------

    @property
    def inside(self) -> bool:
        """Whether batches of the epoch are left, as far as the loader tells, and the program does not leave them."""
        if self._left and self._leaves:
            return False
        try:
            return 0 < self._begun < len(self)
        except TypeError:
            return self._begun > 0

    @property
    def over(self) -> bool:
        """Whether an epoch has been run to its end, and no other has begun."""
        return self._stream is not None and not self.inside

    def position(self) -> dict[str, Any]:
        """Return where the sequence of batches stands, for `resume`; what has been yielded counts as used."""
        if self._stream is None and self._given is not None:  # resumed, and nothing has been yielded since
            before = {"epoch": self._upcoming, "batch": self._skip, "initial": self._given, "of": self.likeness}
            return {**before, "at": self._at, "mark": self._mark, "left": self._left}
        initial = None if self._stream is None else (self._seed, self._initial, self._initial_generators)
        about = {"initial": initial, "of": self.likeness, "left": self._left}
        if not self.inside:
            return {**about, "epoch": self._upcoming, "batch": 0, "at": self._here(), "mark": None}
        return {**about, "epoch": self._position - 1, "batch": self._begun, "at": self._at, "mark": _mark(self._last)}

    @property
    def likeness(self) -> list[Any]:
        """What tells this loader from others, in every run of a program: what it is made of, and the sizes of that."""
        one = self.loader
        made_of = [one, getattr(one, "dataset", None), *samplers(one)]
        types = [*(type(each).__name__ for each in made_of), f"{len(generators(one))} generators"]
        return [types, str(getattr(one, "batch_size", None)), *map(_size, made_of)]

    def is_among(self, world: World) -> bool:
        """Return whether batches are shared out among as many ranks, of which this one has the same place."""
        return (self._among.size, self._among.rank) == (world.size, world.rank)

    def resume(self, position: dict[str, Any]) -> None:
        """Make the next iteration go on where `position` was taken, with any number of ranks."""
        self._given, self._stream = position["initial"], None
        self._position, self._begun = 0, 0
        # The program alone tells samplers of epochs, as it would have done if nothing had interrupted it.
        self._upcoming, self._skip = position["epoch"], position["batch"]
        self._at, self._mark = position.get("at"), position.get("mark")
        left = bool(position.get("left"))
        self._left = left and not self._skip
        if left and self._skip and self.world.rank == 0:
            warn(
                f"the run before has left its loop after batch {self._skip - 1} of epoch {self._upcoming}, and then "
                "saved: the rest of that epoch comes first now. A loop that leaves each epoch early would have begun "
                "the next one, and does so where it has left two of them before it saves",
            )

    def _here(self) -> Any:
        """Return the epoch for which the random numbers stand ready, and their state; None if loaded by index."""
        if self._by_index or self._stream is None:
            return None
        return self._position, self._stream.states, [state_of(one) for one in own_generators(self.loader)]

    def _compare(self, last: Any) -> None:
        """Warn if the last batch that was left out is not the one that the run before has used."""
        mark, self._mark = self._mark, None
        if mark is not None and mark != _mark(last) and self.world.rank == 0:
            lasting = getattr(self.loader, "persistent_workers", False)
            remedy = "; persistent workers go on with random numbers of the epochs before: say persistent_workers=False"
            warn(
                f"the loader's batch {self._begun - self._by_index - 1} of epoch {self._position - 1} is not the one "
                "that the checkpoint's run has used: from here on, training takes other samples than one that nothing "
                "has interrupted. The data, the size of batches, or what a sampler or data set keeps between epochs "
                f"differs{remedy * lasting}",
            )

    def _take_skip(self) -> int:
        skip, self._skip = self._skip, 0
        return skip

    # --- the same sequence on every rank ----------------------------------------------------------------------------

    def _start(self) -> Any:
        """Take over rank 0's random state; a collective operation, once in the life of a loader."""
        found = generators(self.loader)
        number = self._number_beside_others() if self._given is None else 0
        mine: Any = self._given or (
            mix(torch.initial_seed(), number) if number else torch.initial_seed(),
            RngStates.now().apart(number),
            [g.get_state() for g in found],
        )
        self._seed, self._initial, self._initial_generators = self.world.from_root(mine)
        for generator, state in zip(found, self._initial_generators, strict=False):  # a changed program has others
            generator.set_state(state)
        self._stream, self.process_seed = RandomStream(self._initial), torch.initial_seed()
        if self._by_index:
            loader: Any = self.loader
            self._sampler = RankSampler(
                loader.batch_sampler,
                self._stream,
                self._among.size,
                self._among.rank,
                keep_step=self._keep_step,
                agree=self._agree,
            )
            self._worker_generator = torch.Generator()
            seed = self._seed if self._seed_samples else None
            self._inner = inner_loader(loader, seed, self._sampler, self._worker_generator)
        return self._agree

    def _number_beside_others(self) -> int:
        """Return by which random numbers it shuffles, of all that the state of this process gives."""
        state, number = torch.get_rng_state().numpy().tobytes(), self._number
        if number is None:  # those of one number would take samples in one order, always the same ones together
            taken = {one._shuffles_by for one in _loaders if one.under_way and one is not self}
            number = next(i for i in itertools.count() if (state, i) not in taken)
        self._shuffles_by = state, number
        return number

    def _agree(self, first: Any) -> None:
        """Compare the data set, and the first batch of the first epoch, with other ranks'."""
        everyone = self.world.from_all((_batch_shard.fingerprint(first), *self._data_mark(first)))
        for rank, marks in enumerate(everyone):
            batch, length, sample = marks
            same_batch, same_length, same_sample = everyone[0]
            if length != same_length:
                raise ValueError(_own_data(rank, f"{length} samples and {same_length}"))
            if batch != same_batch:
                raise ValueError(
                    f"the loader's first batch on rank {rank} is not that of rank 0 (they begin "
                    f"{_brief(batch)} and {_brief(same_batch)}). hocket shares out one sequence of batches: every rank "
                    "must see the same. Seed the sampler or data set that draws random numbers of its own, and do not "
                    "divide the data among ranks yourself"
                )
            if sample is not None and same_sample is not None and sample != same_sample:
                raise ValueError(_own_data(rank, f"first samples {_brief(sample)} and {_brief(same_sample)}"))

    def _data_mark(self, first: Any) -> tuple[int | None, list[Any] | None]:
        """Return the number of samples, and of a data set that is read here its first one; None for what is not known.

        With worker processes it is they who open files, and nothing may be read before they start.
        """
        if not self._by_index or self.world.size == 1:
            return None, None
        loader: Any = self.loader
        dataset = loader.dataset
        length = len(dataset) if hasattr(dataset, "__len__") else None
        if not first or (loader.num_workers and not is_deterministic(dataset)):
            return length, None
        # What two readings do not give alike draws random numbers of its own, and tells nothing.
        seeded = SeededDataset(dataset, self._seed)
        twice = [_batch_shard.fingerprint(seeded.__getitems__([(0, first[0], 0)])) for _ in range(2)]
        return length, twice[0] if twice[0] == twice[1] else None

    def _seek(self, stream: RandomStream) -> None:
        if self._at is not None and self._at[0] == self._upcoming:
            self._position, states, own = self._at
            stream.restart(states)
            put_back_generators(own, self.loader)
        elif self._upcoming < self._position:
            stream.restart(self._initial)
            for generator, state in zip(generators(self.loader), self._initial_generators, strict=False):
                generator.set_state(state)
            self._position = 0
        while self._position < self._upcoming:
            with stream:
                self._draw_and_drop(self._position)
            self._position += 1

    def _draw_and_drop(self, epoch: int) -> None:
        if isinstance(self.loader, DataLoader):
            batches: Any = self.loader.batch_sampler
            ends = self._by_index and hasattr(batches, "__len__")  # an endless one has only one epoch
            begun = iter(batches) if ends else ()
            draw_worker_seed(self.loader, epoch)
            deque(begun, maxlen=0)


class DistributedLoader(SharedLoader):
    """A loader for training on several ranks: the user's loader with a batch size that counts for all ranks together.

    Each rank iterates over its part of every batch: contiguous, in the order of ranks, the first `B % n` ranks one
    sample more. All ranks make the same number of steps. Where a rank's part is smaller or larger than others', the
    model's gradients and `hocket.average` are weighted accordingly; a rank without any sample in a batch gets one that
    weighs nothing.

    The sequence of samples does not depend on the number of ranks. It is the one that torch's own loader gives in a
    program that draws no other random numbers while it iterates: rank 0's random state at the first iteration is where
    all ranks begin. Random augmentation in a data set that is loaded by index is seeded for each sample by its place in
    that sequence, so it depends neither on ranks nor on `num_workers`.

    The first iteration is a collective operation: all ranks must begin it.

    Args:
        loader: A torch DataLoader or any iterable of batches, the same on every rank. A DataLoader over a map-style
            data set loads only this rank's samples; batches of anything else are loaded by every rank and cut along
            the first axis of their tensors (tuples, lists, mappings of tensors and arrays). A list has one tensor for
            each field; lists with one for each sample are recognised by the loader's `batch_size`.
        group: The ranks that share each batch; None for torch's default group.
        seed_samples: Whether each sample is loaded with torch's, Python's and numpy's global generators seeded by its
            place (and put back after). It costs some 10 us a sample, nothing for data sets like TensorDataset.

    Raises:
        ValueError: the loader's sampler divides the data set already.
    """

    loss_weight: Callable[[Any], Any] | None = None
    """Gives what the mean loss of a part of a batch divides by; None where that is its samples."""

    between: Callable[[], None] | None = None
    """Called by all ranks before the first batch, and when the program has done with one that is not the last."""

    def __iter__(self) -> Iterator[Any]:
        try:
            if self.between is not None:
                self.between()
            for share, part in loading(self._parts()):
                if share.world > 1:
                    in_turn("a loader of hocket.distribute")
                (alone, packed), self._alone, self._packed = (self._alone, self._packed), None, None
                counted = self._counted(share, part)
                _batch.enter(self, share, part, *counted, drawn=self._last or (), alone=alone, packed=packed)
                yield part
                if self.between is not None and self.inside:
                    self.between()
        finally:
            self._leave()

    def _counted(self, share: BatchShard, part: Any) -> tuple[float | None, float]:
        """Return the weight of a part by what it counts, and that of one; a collective operation."""
        if self.loss_weight is None or share.world == 1:
            return None, 0.0
        count = number(self.loss_weight(part), "loss_weight") if share.samples else 0.0
        total = torch.tensor(count, dtype=torch.float64, device=self._among.device)
        self._among.all_reduce(total)
        unit = share.world / float(total) if float(total) else 0.0
        return count * unit if unit else share.weight, unit


class ShardedLoader(SharedLoader):
    """A loader for evaluation: over all ranks, every sample is seen exactly once, and none is repeated to fill up.

    All ranks must begin an iteration together; they then evaluate with rank 0's buffers (batch norm's statistics).
    Ranks may get different numbers of batches, so the loop must not contain collective operations; add up with
    `hocket.total` after it. Arguments as for `DistributedLoader`.
    """

    _keep_step = False

    def __iter__(self) -> Iterator[Any]:
        for synchronise in _batch.before_evaluation:
            synchronise(self.world)
        try:
            for _, part in loading(self._parts()):
                _batch.enter(self, None, part)
                yield part
        finally:
            self._leave()

    def __len__(self) -> int:
        """Batches that this rank gets; one too many at most where the user's sampler does not tell its sizes."""
        batches = getattr(self.loader, "batch_sampler", None)
        if type(batches) is not BatchSampler or not self._by_index:
            return super().__len__()
        whole, rest = divmod(len(batches.sampler), batches.batch_size)  # type: ignore[arg-type]
        rank = self._among.rank
        return whole * (batches.batch_size > rank) + (rest > rank and not batches.drop_last)


_MIXED = (
    "the loader's collate_fn gives a sample something else beside other samples (it mixes them, normalises by them, "
    "takes negatives of them), and each rank calls it with its own part of a batch: losses are not those of one "
    "device. Do it for each sample, in the data set; or pass an object whose __iter__ gives the DataLoader's batches, "
    "of which every rank loads all and keeps its part"
)


def _mark(batch: Any) -> int:
    return zlib.crc32(repr(batch).encode())


def _size(one: Any) -> int | None:
    try:
        return len(one)
    except Exception:  # it has none, or not yet
        return None


def _own_data(rank: int, what: str) -> str:
    return (
        f"rank {rank} and rank 0 hold different data: {what}. hocket shares out each batch of one data set: give every "
        "rank all of it, the same, in the same order (no shard of it, no file of the rank's own, and any random choice "
        "with a fixed seed)"
    )


def _brief(mark: list[Any]) -> str:
    text = repr(mark[:4])
    return text if len(text) <= 60 else text[:57] + "..."
