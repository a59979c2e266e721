"""Ratings as a torch data set."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hocket.workloads.recommender.ratings import Ratings


class Shuffled(Dataset[tuple[Tensor, Tensor, Tensor, Tensor]]):
    """Item ``index`` is (numbers, ids, genres, liked) of one rating; every epoch has its own order, from the seed."""

    def __init__(self, ratings: Ratings, *, seed: int = 0) -> None:
        self._columns = tuple(
            torch.from_numpy(column) for column in (ratings.numbers, ratings.ids, ratings.genres, ratings.liked)
        )
        self._seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose which epoch's order the items have."""
        self._order = np.random.default_rng((self._seed, epoch)).permutation(len(self._columns[0]))

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"Shuffled: index {index} is not in 0..{len(self) - 1}")
        row = int(self._order[index])
        numbers, ids, genres, liked = self._columns
        return numbers[row], ids[row], genres[row], liked[row]
