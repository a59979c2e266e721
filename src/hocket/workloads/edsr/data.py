"""Training patches and held-out photographs as torch data sets."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hocket.workloads._drawn import Drawn
from hocket.workloads.edsr.photographs import Photograph, Pixels
from hocket.workloads.edsr.settings import PATCHES_PER_EPOCH


def to_tensor(pixels: Pixels) -> Tensor:
    """Turn (H, W, 3) bytes into (3, H, W) float32 in [0, 1]."""
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))).to(torch.float32) / 255.0


def to_pixels(image: Tensor) -> Pixels:
    """Turn (3, H, W) in [0, 1] into (H, W, 3) bytes, clipped and rounded."""
    levels = (image.detach().clamp(0.0, 1.0) * 255.0).round().to(torch.uint8)
    return np.ascontiguousarray(levels.cpu().numpy().transpose(1, 2, 0))


def turn(pixels: Pixels, symmetry: int) -> Pixels:
    """Return one of the eight symmetries of the square: bits 0 and 1 count quarter turns, bit 2 mirrors first."""
    if symmetry & 4:
        pixels = pixels[:, ::-1]
    return np.rot90(pixels, symmetry & 3)


class Patches(Drawn[tuple[Tensor, Tensor]]):
    """Random patches: item ``index`` is a pair (low, high), (3, P/scale, P/scale) and (3, P, P), in [0, 1].

    A patch is a function of (seed, epoch, index) alone; no generator is carried from one patch to the next. So it does
    not matter which worker, or which loader process, draws it. Raises ValueError if there is no photograph, or the
    patch is no multiple of the scale or larger than a photograph.

    Args:
        photographs: Where to cut; all of the same scale. Each photograph is as likely as any other.
        patch: Side P of the high-resolution patch in pixels; a multiple of the scale.
        seed: Chooses the sequence.
        length: Patches in one epoch.
    """

    def __init__(
        self, photographs: Sequence[Photograph], patch: int, *, seed: int = 0, length: int = PATCHES_PER_EPOCH
    ) -> None:
        if not photographs:
            raise ValueError("Patches: no photographs")
        scale = photographs[0].scale
        if patch < scale or patch % scale:
            raise ValueError(f"Patches: patch {patch} is not a multiple of the scale {scale}")
        for photograph in photographs:
            height, width = photograph.high.shape[:2]
            if patch > min(height, width):
                raise ValueError(f"Patches: patch {patch} is larger than {photograph.name} ({width}x{height} pixels)")
        super().__init__(seed=seed, length=length)
        self.photographs = tuple(photographs)
        self.patch = patch
        self.scale = scale

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = self.random(index)
        photograph = self.photographs[random.integers(len(self.photographs))]
        side = self.patch // self.scale
        height, width = photograph.low.shape[:2]
        top, left = int(random.integers(height - side + 1)), int(random.integers(width - side + 1))
        symmetry = int(random.integers(8))
        low = photograph.low[top : top + side, left : left + side]
        high = photograph.high[
            top * self.scale : top * self.scale + self.patch, left * self.scale : left * self.scale + self.patch
        ]
        return to_tensor(turn(low, symmetry)), to_tensor(turn(high, symmetry))


class HeldOut(Dataset[tuple[int, Tensor, Tensor, Tensor]]):
    """Whole photographs: item ``index`` is (index, low, bicubic, high); (3, H, W) each, in [0, 1]."""

    def __init__(self, photographs: Sequence[Photograph]) -> None:
        self.photographs = tuple(photographs)

    def __len__(self) -> int:
        return len(self.photographs)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor, Tensor]:
        photograph = self.photographs[index]
        return index, to_tensor(photograph.low), to_tensor(photograph.bicubic()), to_tensor(photograph.high)
