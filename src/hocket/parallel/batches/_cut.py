"""Cuts a batch into samples: which of its parts have one entry for each sample, and which belong to it as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from . import trees as _trees

Path = tuple[Any, ...]  # keys and positions that lead to a part of a batch


class Cutter:
    """Cuts the batches of one loader.

    Whatever has the length of the batch along its first axis is cut: tensors, arrays, and lists of plain values. A list
    of tensors has an entry for each field (inputs, targets), all of which are cut; or, as some collating functions make
    it, an entry for each sample. The latter is assumed if the list is as long as the loader's batches and the first
    axes of its tensors are not. All else (a scalar, a table of class weights) belongs to the batch and stays whole.

    The first batch decides for all: the last one may be as long as anything.

    Args:
        expected: samples of the loader's first batch, if it tells.
    """

    def __init__(self, expected: int | None) -> None:
        self._expected = expected
        self._lengths: dict[Path, int] | None = None  # of the lists of fields in the first batch
        self._by_sample: set[Path] = set()  # lists with an entry for each sample

    def size(self, batch: Any) -> int:
        """Samples in a batch.

        Raises:
            TypeError: the batch holds no tensor or array that could be cut.
            ValueError: it is not clear where its samples are.
        """
        lengths: dict[Path, int] = {}
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
                "axis in tuples, lists or mappings. Pass hocket.distribute a torch DataLoader over a map-style data "
                "set, or batches made of those"
            )
        return size

    def cut(self, batch: Any, begin: int, end: int) -> Any:
        """Samples `begin` to `end` of a batch of which `size` has been asked."""
        return self._cut(batch, (), begin, end, self._first_axis(batch, ()))

    def _look(self, value: Any, path: Path, lengths: dict[Path, int]) -> None:
        """Finds the lists of tensors in `value`, and in the first batch decides what they are lists of."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                self._look(item, (*path, key), lengths)
        if not isinstance(value, tuple | list) or path in self._by_sample or _axis(value) is None:
            return
        if self._lengths is None and self._has_entry_for_each_sample(value, path):
            self._by_sample.add(path)
            return
        lengths[path] = len(value)
        tensors = [item for item in value if isinstance(item, torch.Tensor | np.ndarray) and item.ndim]
        alike = len({(t.ndim, t.dtype) for t in tensors}) == 1 and len(tensors) == len(value)
        if alike and len(found := {len(t) for t in tensors}) > 1:
            raise ValueError(
                f"cannot share out {_name(path)}: a list of {len(value)} tensors alike but for their first axes, of "
                f"{', '.join(map(str, sorted(found)[:5]))} entries, has no one length to cut. {_REMEDY}"
            )
        for i, item in enumerate(value):
            self._look(item, (*path, i), lengths)

    def _has_entry_for_each_sample(self, value: tuple[Any, ...] | list[Any], path: Path) -> bool:
        expected = self._expected
        if expected is None or len(value) != expected or _axis(value) == expected:
            return False
        if all(isinstance(item, tuple | list) and len(item) == expected for item in value):
            raise ValueError(
                f"cannot share out {_name(path)}: {expected} lists of {expected} entries each, which may be those of "
                f"samples or of fields. {_REMEDY}"
            )
        return not any(isinstance(item, tuple | list) and len(item) == expected for item in value)

    def _first_axis(self, value: Any, path: Path) -> int | None:
        """The length of the first thing in `value` that has one entry for each sample."""
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
            return value[begin:end] if value.ndim and value.shape[0] == total else value
        if isinstance(value, Mapping):
            parts = {key: self._cut(item, (*path, key), begin, end, total) for key, item in value.items()}
            return _trees.like_mapping(value, parts)
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


def _entries(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, tuple | list) else []


def _axis(value: Any) -> int | None:
    """The length of the first axis of the first tensor or array in `value`."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.shape[0]) if value.ndim else None
    for _, item in _entries(value):
        size = _axis(item)
        if size is not None:
            return size
    return None


def _name(path: Path) -> str:
    return "the batch" + "".join(f"[{key!r}]" for key in path)
