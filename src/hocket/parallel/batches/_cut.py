"""Cuts a batch along its samples, for ranks and for passes of gradient accumulation, with the weights of the parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..mesh import World
from . import batch as _batch
from . import trees as _trees
from ._batch_entries import digest, due, entries_of
from ._batch_shard import BatchShard

Path = tuple[Any, ...]  # keys and positions that lead to a part of a batch


class Cutter:
    """Cuts the batches of one loader.

    Whatever has the length of the batch along its first axis is cut: tensors, arrays, and lists of plain values, also
    in mappings and dataclasses. A list of tensors has an entry for each field (inputs, targets), all of which are cut;
    or, as some collating functions make it, an entry for each sample (the objects of a picture, say). The latter is
    assumed if the list is as long as the batch and holds mappings, or tensors whose first axes are not all as long. All
    else (a scalar, a table of class weights) belongs to the batch and stays whole.

    The first batch decides for all: the last one may be as long as anything.

    Args:
        expected: Samples of the loader's first batch, if it tells; else tensors and lists of equal lengths do.
    """

    def __init__(self, expected: int | None) -> None:
        self._expected = expected
        self._lengths: dict[Path, int] | None = None  # of the lists of fields in the first batch
        self._by_sample: set[Path] = set()  # lists with an entry for each sample
        self._checked = False  # whether a batch that was cut has been looked at for what is flattened

    def size(self, batch: Any) -> int:
        """Return how many samples a batch has.

        Raises:
            TypeError: the batch holds no tensor or array that could be cut.
            ValueError: it is not clear where its samples are.
        """
        lengths: dict[Path, int] = {}
        if self._lengths is None and self._expected is None:
            self._expected = _length_of_lists(batch)
        self._look(batch, (), lengths)
        if self._lengths is None:
            self._lengths = lengths
        for path, length in lengths.items():
            if path in self._lengths and self._lengths[path] != length:
                raise ValueError(
                    f"cannot share out {_name(path)}: a list of {self._lengths[path]} tensors in the first batch and "
                    f"of {length} now. {_REMEDY}"
                )
        size = self._first_axis(batch, ())
        if size is None:
            raise TypeError(
                f"cannot share out a batch of type {type(batch).__name__}: it holds no tensor or array with a first "
                "axis in tuples, lists, mappings or dataclasses. Pass hocket.distribute a torch DataLoader over a "
                "map-style data set, or batches made of those"
            )
        return size

    def cut(self, batch: Any, begin: int, end: int, samples: int | None = None) -> Any:
        """Return samples `begin` to `end` of a batch; of fields that have so many `samples`, if that is known.

        Raises:
            ValueError: it is not clear where its samples are.
        """
        if self._lengths is None and samples is not None:
            self._look(batch, (), {}, samples)
        elif self._lengths is None:
            self.size(batch)
        total = samples or self._first_axis(batch, ())
        if not self._checked and total is not None and end - begin < total:
            self._checked = True
            _refuse_flattened(batch, total)
        return self._cut(batch, (), begin, end, total)

    def _look(self, value: Any, path: Path, lengths: dict[Path, int], samples: int | None = None) -> None:
        """Find the lists of tensors in `value`, and in the first batch decide what they are lists of.

        Where it is known how many `samples` there are, tensors of other lengths belong to the batch.
        """
        if isinstance(value, Mapping) or _trees.is_dataclass(value):
            for key, item in _entries(value):
                self._look(item, (*path, key), lengths, samples)
        if not isinstance(value, tuple | list) or path in self._by_sample or _axis(value) is None:
            return
        fields = samples is not None and not path
        if self._lengths is None and not fields and self._has_entry_for_each_sample(value, path):
            self._by_sample.add(path)
            return
        lengths[path] = len(value)
        tensors = [item for item in value if isinstance(item, torch.Tensor | np.ndarray) and item.ndim]
        same_kind = len({(t.ndim, t.dtype) for t in tensors}) == 1 and len(tensors) == len(value)
        if same_kind and len(found := {len(t) for t in tensors}) > 1 and samples not in found:
            raise ValueError(
                f"cannot share out {_name(path)}: a list of {len(value)} tensors alike but for their first axes, of "
                f"{', '.join(map(str, sorted(found)[:5]))} entries, has no one length to cut. {_REMEDY}"
            )
        for i, item in enumerate(value):
            self._look(item, (*path, i), lengths, samples)

    def _has_entry_for_each_sample(self, value: tuple[Any, ...] | list[Any], path: Path) -> bool:
        expected = self._expected
        if expected is None or len(value) != expected:
            return False
        if path and all(isinstance(item, Mapping) for item in value):
            return True
        kinds = {(t.ndim, t.dtype) if isinstance(t, torch.Tensor | np.ndarray) else None for t in value}
        ragged = path and len(kinds) == 1 and any(axis != expected for axis in _axes(value))
        if _axis(value) == expected and not ragged:
            return False
        if all(isinstance(item, tuple | list) and len(item) == expected for item in value):
            raise ValueError(
                f"cannot share out {_name(path)}: {expected} lists of {expected} entries each, which may be those of "
                f"samples or of fields. {_REMEDY}"
            )
        return not any(isinstance(item, tuple | list) and len(item) == expected for item in value)

    def _first_axis(self, value: Any, path: Path) -> int | None:
        """Return the length of the first thing in `value` that has one entry for each sample."""
        if path in self._by_sample or isinstance(value, torch.Tensor | np.ndarray):
            return len(value) if path in self._by_sample else _axis(value)
        for key, item in _entries(value):
            size = self._first_axis(item, (*path, key))
            if size is not None:
                return size
        return None

    def _cut(self, value: Any, path: Path, begin: int, end: int, total: int | None) -> Any:
        if path in self._by_sample:
            return value[begin:end]
        if isinstance(value, torch.Tensor | np.ndarray):
            return _rows(value, begin, end) if value.ndim and value.shape[0] == total else value
        if isinstance(value, Mapping):
            parts = {key: self._cut(item, (*path, key), begin, end, total) for key, item in value.items()}
            return _trees.like_mapping(value, parts)
        if _trees.is_dataclass(value):
            parts = {key: self._cut(item, (*path, key), begin, end, total) for key, item in _entries(value)}
            return _trees.like_dataclass(value, parts)
        if isinstance(value, tuple | list):
            if _axis(value) is None:  # plain values: one for each sample, or something else
                return value[begin:end] if len(value) == total else value
            parts_in_order = [self._cut(item, (*path, i), begin, end, total) for i, item in enumerate(value)]
            return _trees.like_sequence(value, parts_in_order)
        return value


_REMEDY = (
    "Where each sample has an entry of its own, pass hocket.distribute a torch DataLoader over a map-style data set, "
    "which need not be cut, or give the loader the attribute batch_size; where each field has one, pass the fields as "
    "a mapping"
)


def _refuse_flattened(batch: Any, total: int) -> None:
    """Refuse a tensor with as many rows as another has places in its first two axes, of which samples are the first."""
    shapes = [tuple(one.shape) for one in _trees.tensors_in(batch) if one.dim()]
    places = {total * shape[1]: shape for shape in shapes if len(shape) > 1 and shape[0] == total and shape[1] > 1}
    if total > 1 and (flat := next((one for one in shapes if one[0] in places and one[0] != total), None)):
        whole = places[flat[0]]
        raise ValueError(
            f"cannot share out a batch with tensors of shapes {list(whole)} and {list(flat)}: hocket divides the first "
            f"axis, of {total} samples, and the other is flattened. Have the loader give it in the shape "
            f"{[*whole[:2], *flat[1:]]}, and flatten it in the loop; if samples are the second axis, have the loader "
            "give them first"
        )


def _rows(value: Any, begin: int, end: int) -> Any:
    """Return some rows of a tensor or an array; of a nested tensor, which torch does not cut, one of its own."""
    if not isinstance(value, torch.Tensor) or not value.is_nested:
        return value[begin:end]
    return torch.nested.as_nested_tensor(list(value.unbind()[begin:end]), layout=value.layout)


def _entries(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if _trees.is_dataclass(value):
        return [(name, getattr(value, name)) for name in value.__dataclass_fields__]
    return list(enumerate(value)) if isinstance(value, tuple | list) else []


def _axes(value: Any, but: Any = None) -> Iterator[int]:
    """Yield the lengths of the first axes of the tensors and arrays in `value`, `but` for one part of it."""
    if isinstance(value, torch.Tensor | np.ndarray):
        yield from value.shape[:1]
    for _, item in _entries(value):
        if item is not but:
            yield from _axes(item, but)


def _axis(value: Any) -> int | None:
    """Return the length of the first axis of the first tensor or array in `value`."""
    return next(_axes(value), None)


def _length_of_lists(batch: Any) -> int | None:
    """Return how many samples a batch has in which lists, too, have an entry for each; None if that is not known.

    So long is a list of mappings, and a tensor or another list; or a tensor beside a list of tensors.
    """
    lists = list(_nested(batch))
    for one in (one for one in lists if all(isinstance(item, Mapping) for item in one)):
        others = (len(other) for other in lists if other is not one)
        if len(one) in _axes(batch, one) or len(one) in others:
            return len(one)
    fields = next(_fields(batch), 0)
    return fields if any(len(one) == fields for one in lists) else None


def _fields(value: Any) -> Iterator[int]:
    """Yield the lengths of the tensors in a structure, but for those in lists that it holds."""
    for _, item in _entries(value):
        if isinstance(item, torch.Tensor | np.ndarray):
            yield from item.shape[:1]
        elif not isinstance(item, tuple | list):
            yield from _fields(item)


def _nested(value: Any) -> Iterator[Any]:
    """Yield the lists and tuples in a structure."""
    for _, item in _entries(value):
        if isinstance(item, tuple | list) and len(item):
            yield item
        yield from _nested(item)


def cut_fields(inputs: Any, target: Any, begin: int, end: int, samples: int) -> tuple[Any, Any]:
    """Return some of so many samples: of a model's inputs, a tuple or a mapping, and of the loss's target."""
    batch = (inputs, target) if isinstance(inputs, Mapping) else (*inputs, target)
    *some, goal = Cutter(samples).cut(batch, begin, end, samples)
    return (some[0] if isinstance(inputs, Mapping) else _trees.like_sequence(inputs, some)), goal


def samples_in(batch: Any, expected: int | None = None) -> int:
    """Return how many samples a batch has: the length of its first tensor that has a dimension; 0 if there is none.

    How many are `expected` tells whether a list has an entry for each.
    """
    try:
        return Cutter(expected).size(batch)
    except (TypeError, ValueError):
        return _axis(batch) or 0


def _name(path: Path) -> str:
    return "the batch" + "".join(f"[{key!r}]" for key in path)


@dataclass(frozen=True, slots=True)
class BatchPart:
    """What goes through the model at once: a rank's shard of a batch, or one of its gradient accumulation steps."""

    inputs: tuple[Any, ...] | dict[str, Any]  # inputs of the model: a tuple in order, or a dict by keyword
    target: Any  # of the loss: the batch's last entry, all of a batch of keywords, or None where the model has the loss
    samples: int  # how many samples count: none where one was given so that the rank keeps step with others
    total: int  # samples of the global batch

    def copied(self) -> BatchPart:
        """Return the same, for a pass besides the program's own: a model or loss may change what it gets in place."""
        return self.mapped(lambda one: one.detach().clone())

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> BatchPart:
        """Return the same of tensors that are changed."""
        inputs, target = _trees.mapped((self.inputs, self.target), change)
        return BatchPart(inputs, target, self.samples, self.total)


class Keywords:
    """Which entries of a batch of keywords go to a model; if `targeted`, a loss function gets all of them."""

    def __init__(self, forward: Callable[..., Any], *, targeted: bool) -> None:
        self._names: set[str] | None = None  # any
        with suppress(ValueError):  # what torch.jit has compiled has no signature
            found = inspect.signature(forward).parameters.values()
            if not any(one.kind is one.VAR_KEYWORD for one in found):
                self._names = {one.name for one in found}
        self._targeted = targeted

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model's entries. Raises TypeError: an entry is neither the model's nor a loss function's."""
        strange = [key for key in batch if self._names is not None and key not in self._names]
        if strange and not self._targeted:
            raise TypeError(
                f"the batch has {', '.join(map(repr, strange))}, which the model's forward does not take: it takes "
                f"{', '.join(sorted(self._names or ()))}. Leave it out of the batch, or pass the loss_fn that wants it"
            )
        return {key: value for key, value in batch.items() if key not in strange}


class BatchSplitter:
    """Cuts batches for one rank and its passes.

    Args:
        world: The ranks that have different parts of a batch.
        taken: What of a mapping the model takes.
        targeted: Whether a loss function gets a target.
        settle: Makes ranks ready to talk to each other, to agree on what a batch is; None if they may not.

    Attributes:
        unsure: Whether only what the other ranks were given has told what the latest batch is.
    """

    def __init__(
        self, world: World, taken: Keywords, *, targeted: bool = True, settle: Callable[[], None] | None = None
    ) -> None:
        self._world = world
        self._taken = taken
        self._targeted = targeted
        self._settle = settle
        self._cutter = Cutter(None)
        self._calls = 0
        self._share: BatchShard | None = None
        self.unsure = False

    def parts(self, batch: Any, count: int) -> list[BatchPart]:
        """Return this rank's part of a batch, in `count` parts.

        A batch that a loader of `Trainer.batches` has yielded is this rank's part already, also if the program has
        computed another of it; any other is taken for the global batch, the same on every rank. A collective operation
        where that is not known without.

        Raises:
            TypeError: the batch is no tuple or list of inputs and a target, and no mapping of keywords.
        """
        if not isinstance(batch, Mapping) and (
            not isinstance(batch, tuple | list) or len(batch) < (2 if self._targeted else 1)
        ):
            then = " and then the target" if self._targeted else ""
            raise TypeError(
                f"a batch is a tuple or list of the model's inputs{then}, or a mapping of its keywords, not "
                f"{type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
            )
        values: Any = dict(batch) if isinstance(batch, Mapping) else tuple(batch)
        size = self._cutter.size(values)
        self._share = share = self._shared(values, size)
        if share is None:
            share = BatchShard.of(size, self._world.size, self._world.rank)
            values = self._cutter.cut(values, *_range(share.begin, share.end))
        return [self._part(values, share, count, i) for i in range(count)]

    @property
    def gave_part(self) -> bool:
        """Whether the latest batch was this rank's part already."""
        return self._world.size > 1 and self._share is not None

    def whole(self, batch: Any) -> BatchPart | None:
        """Return all of a batch of which `parts` has been asked; None where this rank has a part of it alone."""
        return None if self.gave_part else self.part_of(batch, self._cutter.size(batch))

    def part_of(self, batch: Any, samples: int) -> BatchPart:
        """Return all of a batch of so many samples as one part."""
        values: Any = dict(batch) if isinstance(batch, Mapping) else tuple(batch)
        return self._part(values, BatchShard(0, samples, samples, 1), 1, 0)

    def _shared(self, values: Any, size: int) -> BatchShard | None:
        """Return which part of the global batch `values` is; None where it is the global batch, yet to be cut."""
        if self._world.size == 1:
            return BatchShard(0, size, size, 1)
        self._calls += 1
        self.unsure = False
        shares = _batch.recent(self._world.size)
        # What a loader has yielded, or was computed of it meanwhile, if all ranks' parts are alike, is known by itself.
        held, latest = _batch.current(values), _batch.current()
        share = None if held is None or not held.holds(values) else held.share
        if share is not None and share.world == self._world.size and max(1, share.samples) == size:
            return share
        if latest is not None and latest.share in shares and max(1, latest.share.samples) == size:
            going = _batch.is_open(latest) and not latest.share.uneven
            if self._settle is None or (going and not due(self._calls)):
                return latest.share
        if not shares or self._settle is None:
            return None
        self._settle()
        self.unsure = True  # it may be of a batch before, where the program reads ahead
        fitting = [max(1, one.samples) == size for one in shares]
        everyone = self._world.from_all((fitting, digest(list(entries_of(values)))))
        if len({mark for _, mark in everyone}) == 1:
            return None
        together = map(all, zip(*(fits for fits, _ in everyone), strict=True))
        return next((one for one, fit in zip(shares, together, strict=True) if fit), None)

    def _part(self, values: Any, share: BatchShard, count: int, i: int) -> BatchPart:
        mine = BatchShard.of(share.samples, count, i)
        if count > 1:
            values = self._cutter.cut(values, *_range(mine.begin, mine.end))
        if isinstance(values, Mapping):
            return BatchPart(self._taken(values), values, mine.samples, share.total)
        *inputs, target = values if self._targeted else (*values, None)
        return BatchPart(tuple(inputs), target, mine.samples, share.total)


def _range(begin: int, end: int) -> tuple[int, int]:
    """Return the range, or one sample to keep step where there is none."""
    return (begin, end) if begin < end else (0, 1)
