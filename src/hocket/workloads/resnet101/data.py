"""Images with several handwritten digits each, composed of scikit-learn's; the labels are which digits occur."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hocket._extras import require
from hocket.workloads._drawn import Drawn
from hocket.workloads.resnet101.settings import IMAGES_PER_EPOCH

LABELS = 10
_MOST_DIGITS = 3
_HELD_OUT_EVERY = 5
_SPLIT_SEED = 1998
_DIGIT_SIDE = 8  # pixels
_CELLS = 2  # an image is a grid of 2 by 2 places

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Digits:
    """Handwritten digits: images (n, 8, 8) in [0, 1], and which digit each is (n,)."""

    images: Floats
    values: npt.NDArray[np.int64]


def load() -> tuple[Digits, Digits]:
    """Return the 1,797 digits that come with scikit-learn: those to train with, and one in five, held out.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    require("the workload resnet101", "sklearn")
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    images, values = (found.images / 16.0).astype(np.float32), found.target.astype(np.int64)
    # They lie in an order that repeats: every fifth of them would be the same digits too often.
    held_out = np.random.default_rng(_SPLIT_SEED).permutation(len(images)) % _HELD_OUT_EVERY == 0
    return Digits(images[~held_out], values[~held_out]), Digits(images[held_out], values[held_out])


class Compositions(Drawn[tuple[Tensor, Tensor]]):
    """Item ``index`` is an image (3, side, side) and its labels (10,): float32, 1 for a digit that occurs, else 0.

    One to three digits in random colours stand in different quarters of an image with some noise. An image is a
    function of (seed, epoch, index) alone, so that it does not matter which worker draws it.
    """

    def __init__(self, digits: Digits, side: int, *, seed: int = 0, length: int = IMAGES_PER_EPOCH) -> None:
        super().__init__(seed=seed, length=length)
        self._digits, self._side = digits, side

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = self.random(index)
        image = random.normal(scale=0.1, size=(3, self._side, self._side)).astype(np.float32)
        labels = torch.zeros(LABELS)
        cell = self._side // _CELLS
        factor = cell // _DIGIT_SIDE
        free = cell - factor * _DIGIT_SIDE + 1
        places = random.permutation(_CELLS**2)[: random.integers(1, _MOST_DIGITS + 1)]
        for place in places:
            which = int(random.integers(len(self._digits.images)))
            digit = np.kron(self._digits.images[which], np.ones((factor, factor), dtype=np.float32))
            top, left = (cell * int(corner) + int(random.integers(free)) for corner in divmod(place, _CELLS))
            colour = random.uniform(0.5, 1.0, size=(3, 1, 1)).astype(np.float32)
            image[:, top : top + len(digit), left : left + len(digit)] += colour * digit
            labels[self._digits.values[which]] = 1.0
        return torch.from_numpy(image), labels
