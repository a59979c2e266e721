"""Data sets whose items are drawn: each a function of (seed, epoch, index) alone, whichever worker asks for it."""

from typing import Any, TypeVar

import numpy as np
from torch.utils.data import Dataset

T_co = TypeVar("T_co", covariant=True)


class Drawn(Dataset[T_co]):
    """One epoch of drawn items; `set_epoch` goes on to another. Subclasses make item ``index`` of `random(index)`.

    `seed` chooses the sequence.
    """

    def __init__(self, *, seed: int, length: int) -> None:
        self.seed = seed
        self.epoch = 0
        self._length = length

    def set_epoch(self, epoch: int) -> None:
        """Choose which epoch's items there are."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._length

    def random(self, index: int) -> np.random.Generator:
        """Return an item's random numbers; IndexError, with which iteration over a data set ends, if there is none."""
        if not 0 <= index < self._length:
            raise IndexError(f"{type(self).__name__}: index {index} is not in 0..{self._length - 1}")
        return np.random.default_rng((self.seed, self.epoch, index))


class Numbered(Dataset[tuple[Any, ...]]):
    """Another data set's items with their index in front."""

    def __init__(self, items: Drawn[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return index, *self._items[index]
