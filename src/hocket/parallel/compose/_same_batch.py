"""Sees that ranks which are to compute with one batch were given one: another on each would be no batch's result."""

import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..batches import BatchEntry, digest, due, entries_of
from ..mesh import World
from ..state import random_state


class SameBatch:
    """Compares what ranks are given, in the calls that are powers of two and in every 32nd: it takes time to look."""

    def __init__(self, world: World, what: str) -> None:
        self._world, self._what = world, what
        self._calls = 0

    def compare(self, given: Any, place: Callable[[], int | None] = lambda: None, *, always: bool = False) -> None:
        """Compare what ranks are given for one call; a collective operation.

        Args:
            given: what this rank is to compute with.
            place: gives which part of the global batch that is, which some ranks may share; None for all of it.
            always: whether to look in this call, whichever it is; the same on every rank.

        Raises:
            ValueError: ranks were given something else; on every rank alike.
        """
        self._calls += 1
        if self._world.size == 1 or not (always or due(self._calls)):
            return
        mine = list(entries_of(given))
        marks = self._world.from_all((place(), digest(mine)))
        first = {at: rank for rank, (at, _) in reversed(list(enumerate(marks)))}  # of the ranks that share a part
        if None in first and len(first) > 1:
            raise ValueError(
                f"{self._what} was given a batch of trainer.batches on some ranks, and another on rank {first[None]}: "
                "every rank must take the batch that the loader of trainer.batches yields"
            )
        if all(mark == marks[first[at]][1] for at, mark in marks):
            return
        everyone = self._world.from_all(mine)
        for rank, (at, _) in enumerate(marks):
            self._check(everyone[first[at]], everyone[rank], first[at], rank)

    def _check(self, here: list[BatchEntry], there: list[BatchEntry], first: int, rank: int) -> None:
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


class SameNumbers:
    """Sees that ranks which compute the same samples draw the same random numbers, in as many steps as `SameBatch`.

    Args:
        worlds: Of this rank, those whose ranks each compute a part of what the same samples give.
    """

    def __init__(self, worlds: Sequence[World]) -> None:
        self._worlds = [one for one in worlds if one.size > 1]
        self._calls = 0

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Open a block for the passes of a step; a collective operation.

        Raises:
            RuntimeError: ranks draw, and the states of their random generators differ; on every rank of a world.
        """
        self._calls += 1
        if not (self._worlds and due(self._calls)):
            yield
            return
        before = _marks()
        unlike = [_unlike(world.from_all(before)) for world in self._worlds]
        yield
        for world, kinds in zip(self._worlds, unlike, strict=True):
            after = _marks()
            drawn = world.from_all({kind for kind in kinds if after[kind] != before[kind]}) if kinds else []
            if found := sorted(set().union(*drawn)):
                raise RuntimeError(
                    f"the model or loss_fn draws random numbers ({', '.join(found)}), and the generators of ranks that "
                    "compute the same samples are in unlike states, so that the result would be no one's: seed them "
                    "alike, by torch.manual_seed(seed) and not by seed + rank; ranks with other samples draw others "
                    "anyway"
                )


def _marks() -> dict[str, int]:
    states = random_state().items()
    return {
        kind: zlib.crc32(one.numpy().tobytes() if isinstance(one, torch.Tensor) else pickle.dumps(one))
        for kind, one in states
    }


def _unlike(everyone: Sequence[dict[str, int]]) -> list[str]:
    return [kind for kind in everyone[0] if len({one[kind] for one in everyone}) > 1]


def _hook_of_none() -> Any:
    return _compare_nothing


def _compare_nothing(*_: Any) -> None:
    """Stand in the place of a hook that was saved with its model."""
