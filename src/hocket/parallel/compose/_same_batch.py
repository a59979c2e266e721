"""Sees that ranks which are to compute with one batch were given one: another on each would be no batch's result."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from ..batches.trees import children, is_dataclass
from ..data import due
from ..mesh import World

_ELEMENTS: Final = 4096  # of a tensor that are compared, spread over it: all would take time
_TOLERANCE: Final = 1e-5  # of the largest: hosts of different processors round the last place differently
_BEGIN: Final = 3  # elements that an error has


class _BatchEntry(NamedTuple):
    """Of a batch."""

    name: str
    about: str  # type and shape of a tensor or array, a plain value, or the type of anything else
    elements: np.ndarray[Any, Any]
    tolerance: float

    def alike(self, other: _BatchEntry) -> bool:
        if self[:2] != other[:2]:
            return False
        allowed = self.tolerance * float(np.abs(np.nan_to_num(self.elements)).max(initial=0.0))
        return np.allclose(self.elements, other.elements, 0.0, allowed, equal_nan=True)

    def __str__(self) -> str:
        return " ".join([self.about, *(f"{one:.6g}" for one in self.elements[:_BEGIN])])


class SameBatch:
    """Compares what ranks are given, in the calls that are powers of two and in every 32nd: it takes time to look."""

    def __init__(self, world: World, what: str) -> None:
        self._world, self._what = world, what
        self._calls = 0

    def compare(self, given: Any, place: Callable[[], int | None] = lambda: None) -> None:
        """Compare what ranks are given for one call; a collective operation.

        Args:
            given: what this rank is to compute with.
            place: gives which part of the global batch that is, which some ranks may share; None for all of it.

        Raises:
            ValueError: ranks were given something else; on every rank alike.
        """
        self._calls += 1
        if self._world.size == 1 or not due(self._calls):
            return
        mine = list(_entries(given, "batch"))
        digest = zlib.crc32(repr([one[:2] for one in mine]).encode())
        for one in mine:
            digest = zlib.crc32(one.elements.tobytes(), digest)
        marks = self._world.from_all((place(), digest))
        first = {at: rank for rank, (at, _) in reversed(list(enumerate(marks)))}  # of the ranks that share a part
        if None in first and len(first) > 1:
            raise ValueError(
                f"{self._what} was given a batch of trainer.batches on some ranks, and another on rank {first[None]}: "
                "every rank must take the batch that the loader of trainer.batches yields"
            )
        if all(digest == marks[first[at]][1] for at, digest in marks):
            return
        everyone = self._world.from_all(mine)
        for rank, (at, _) in enumerate(marks):
            self._check(everyone[first[at]], everyone[rank], first[at], rank)

    def _check(self, here: list[_BatchEntry], there: list[_BatchEntry], first: int, rank: int) -> None:
        pairs = zip(here, there, strict=False)
        found = next((f"{one.name} is {other} ..., not {one} ..." for one, other in pairs if not one.alike(other)), "")
        if not found and len(here) != len(there):
            found = f"it has {len(there)} entries, not {len(here)}"
        if found:
            raise ValueError(
                f"{self._what} was given something else on rank {rank} than on rank {first}, which both are to compute "
                f"with: {found}. Every rank must be given the same: all of a batch, and not a part of its own, and "
                "random data with one seed on all ranks (torch.manual_seed(0)). To have batches shared out, loop over "
                "trainer.batches(loader); what makes other samples of these (two parts joined, copies beside them) "
                "belongs into the data set or its collate_fn"
            )


class SameCalls:
    """A hook by which ranks that compute a model together compare with what the program calls it.

    Args:
        world: those ranks.
        when: whether it is the program that calls it.
    """

    def __init__(self, world: World, when: Callable[[], bool]) -> None:
        self._same, self._when = SameBatch(world, "the model"), when

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare."""
        if not torch.compiler.is_compiling() and self._when():
            self._same.compare([*args, kwargs] if kwargs else args)

    def __reduce__(self) -> Any:  # of a model that is saved whole
        return _hook_of_none, ()


def _hook_of_none() -> Any:
    return _compare_nothing


def _compare_nothing(*_: Any) -> None:
    """Stand in the place of a hook that was saved with its model."""


def _entries(value: Any, name: str) -> Iterator[_BatchEntry]:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, torch.Tensor):
        plain = value.layout is torch.strided and not value.is_meta
        flat = value.detach().reshape(-1)[:: max(1, value.numel() // _ELEMENTS)] if plain else torch.empty(0)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        rounded = max(_TOLERANCE, 8 * torch.finfo(flat.dtype).eps) if flat.is_floating_point() else 0.0
        about = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        yield _BatchEntry(name, about, flat.to("cpu", torch.float64).numpy(), rounded)
    elif isinstance(value, Mapping):
        for key in value:
            yield from _entries(value[key], f"{name}[{key!r}]")
    elif isinstance(value, tuple | list):
        for i, one in enumerate(value):
            yield from _entries(one, f"{name}[{i}]")
    elif is_dataclass(value):
        for field, one in zip(value.__dataclass_fields__, children(value), strict=True):
            yield from _entries(one, f"{name}.{field}")
    else:
        plain = isinstance(value, str | bytes | int | float | None)
        yield _BatchEntry(name, repr(value)[:60] if plain else type(value).__name__, np.empty(0), 0.0)
