"""The loaders that a Trainer has open, and where those stood that it has not: what a checkpoint keeps of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..batches import SharedLoader, generators


class OpenLoaders:
    """Loaders of batches, each opened once.

    Args:
        share: Gives what yields this rank's part of each batch of a loader.
    """

    def __init__(self, share: Callable[[Iterable[Any]], SharedLoader]) -> None:
        self._share = share
        self._open: list[SharedLoader] = []
        self._positions: list[dict[str, Any]] = []  # of the run before, or forgotten, for loaders that are not open yet

    def open(self, loader: Iterable[Any]) -> SharedLoader:
        """Return what shares a loader; one that is opened for the first time goes on where its like stands."""
        for shared in self._open:
            if shared.loader is loader or shared is loader:
                return shared
        self._forget()
        shared = self._share(loader)
        self._place(shared)
        self._open.append(shared)
        return shared

    def positions(self) -> list[dict[str, Any]]:
        """Return where all of them stand."""
        return [shared.position() for shared in self._open] + self._positions

    def place(self, positions: Iterable[dict[str, Any]]) -> None:
        """Have loaders go on at these positions, those that are open at once."""
        self._positions = list(positions)
        for shared in self._open:
            self._place(shared, opened=True)

    def _place(self, shared: SharedLoader, *, opened: bool = False) -> None:
        """Let a loader go on where its like stands, in the run before or of those that are forgotten; else begin."""
        kind = shared.likeness

        def alike(position: dict[str, Any]) -> tuple[bool, bool, bool]:
            of = position.get("of", kind)
            # The next batch is one of a loader that the run before had not done with, so that is opened first.
            return of == kind, of[0] == kind[0], position["batch"] > 0 and not opened

        best = max(self._positions, key=alike, default=None)
        if best is not None and any(alike(best)):
            self._positions = [one for one in self._positions if one is not best]
            shared.resume(best)

    def _forget(self) -> None:
        """Forget loaders that were run to their end and that nobody else knows: they are not opened again.

        A program that makes a loader for each epoch goes on where the one before ended, or it would shuffle all alike,
        unless it seeds each of them.
        """
        known = sys.getrefcount(object())  # of what nobody else knows
        held = [one for one in self._open if not one.over or sys.getrefcount(one.loader) > known + 1]
        over = (one for one in self._open if one not in held)
        seed = torch.initial_seed()
        self._positions += [one.position() for one in over if one.process_seed == seed and not generators(one.loader)]
        self._open = held
