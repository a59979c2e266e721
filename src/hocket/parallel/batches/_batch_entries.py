"""What tells a batch from others: types, shapes and some elements of all that it holds."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from hocket.sharding import strided_parts

from .trees import children, is_dataclass

_ELEMENTS: Final = 4096  # of a tensor that are compared, spread over it: all would take time
_TOLERANCE: Final = 1e-5  # of the largest: hosts of different processors round the last place differently
_BEGIN: Final = 3  # elements that an error has


class BatchEntry(NamedTuple):
    """What a batch holds in one place."""

    name: str
    about: str  # type and shape of a tensor or array, a plain value, or the type of anything else
    elements: np.ndarray[Any, Any]
    tolerance: float

    def alike(self, other: BatchEntry) -> bool:
        """Return whether two are the same but for rounding."""
        if self[:2] != other[:2]:
            return False
        allowed = self.tolerance * float(np.abs(np.nan_to_num(self.elements)).max(initial=0.0))
        return np.allclose(self.elements, other.elements, 0.0, allowed, equal_nan=True)

    def __str__(self) -> str:
        return " ".join([self.about, *(f"{one:.6g}" for one in self.elements[:_BEGIN])])


def due(calls: int) -> bool:
    """Return whether ranks compare themselves in a call: in those that are powers of two, and in every 32nd."""
    return not (calls % 32 and calls & (calls - 1))


def digest(entries: Sequence[BatchEntry]) -> int:
    """Return a number that is the same for the same entries."""
    found = zlib.crc32(repr([one[:2] for one in entries]).encode())
    for one in entries:
        found = zlib.crc32(one.elements.tobytes(), found)
    return found


def entries_of(value: Any, name: str = "batch") -> Iterator[BatchEntry]:
    """Yield what a batch holds; `name` is what errors call it."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, torch.Tensor) and value.layout is torch.jagged:  # its shape names the object
        for part, one in zip(("values", "offsets"), strided_parts(value), strict=True):
            yield from entries_of(one, f"{name}.{part}()")
    elif isinstance(value, torch.Tensor):
        plain = value.layout is torch.strided and not value.is_meta
        flat = value.detach().reshape(-1)[:: max(1, value.numel() // _ELEMENTS)] if plain else torch.empty(0)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        rounded = max(_TOLERANCE, 8 * torch.finfo(flat.dtype).eps) if flat.is_floating_point() else 0.0
        about = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        yield BatchEntry(name, about, flat.to("cpu", torch.float64).numpy(), rounded)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from entries_of(one, f"{name}[{key!r}]")
    elif isinstance(value, tuple | list):
        for i, one in enumerate(value):
            yield from entries_of(one, f"{name}[{i}]")
    elif is_dataclass(value):
        for field, one in zip(value.__dataclass_fields__, children(value), strict=True):
            yield from entries_of(one, f"{name}.{field}")
    else:
        plain = isinstance(value, str | bytes | int | float | None)
        yield BatchEntry(name, repr(value)[:60] if plain else type(value).__name__, np.empty(0), 0.0)
