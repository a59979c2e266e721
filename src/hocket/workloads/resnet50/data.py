"""Made-up images, for measuring throughput without a data set."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class SyntheticImages(Dataset[tuple[Tensor, Tensor]]):
    """Noise with labels: item ``index`` is (image, label), (3, side, side) float32 and an int64 scalar.

    A few images are drawn once and used again and again, so that the data costs next to nothing and the throughput is
    the network's.

    Args:
        length: Images in one epoch.
        side: Pixels.
        classes: Labels are in [0, classes).
        seed: Chooses the noise.
        distinct: How many different images there are.
    """

    def __init__(self, length: int, side: int, *, classes: int = 1000, seed: int = 0, distinct: int = 32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._images = torch.randn((distinct, 3, side, side), generator=generator)
        self._labels = torch.randint(classes, (distinct,), generator=generator)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(f"SyntheticImages: index {index} is not in 0..{self._length - 1}")
        return self._images[index % len(self._images)], self._labels[index % len(self._labels)]
