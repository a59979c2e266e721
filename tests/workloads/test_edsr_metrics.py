import math

import numpy as np
import pytest
import torch

from hocket.workloads.edsr.data import to_tensor
from hocket.workloads.edsr.metrics import luma, psnr_y


def pair(seed: int, noise: int = 12) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    original = random.integers(0, 256, (40, 56, 3))
    altered = np.clip(original + random.integers(-noise, noise + 1, original.shape), 0, 255)
    return altered.astype(np.uint8), original.astype(np.uint8)


@pytest.mark.parametrize("border", [0, 2, 4])
def test_psnr_is_that_of_scikit_image(border: int) -> None:
    from skimage.color import rgb2ycbcr
    from skimage.metrics import peak_signal_noise_ratio

    altered, original = pair(border)
    inside = slice(border, -border or None)
    expected = peak_signal_noise_ratio(
        rgb2ycbcr(original)[inside, inside, 0], rgb2ycbcr(altered)[inside, inside, 0], data_range=255
    )
    assert psnr_y(to_tensor(altered), to_tensor(original), border=border) == pytest.approx(expected, abs=1e-6)


def test_luma_runs_from_16_to_235() -> None:
    assert luma(torch.zeros(3, 1, 1)).item() == 16.0
    assert luma(torch.ones(3, 1, 1)).item() == pytest.approx(235.0)


def test_an_image_is_judged_as_it_would_be_stored() -> None:
    """Clipped to [0, 1] and rounded to 8 bits: neither overshoot nor a third of a level counts."""
    original = torch.zeros(3, 8, 8)
    original[:, 4:] = 1.0
    overshot = torch.where(original > 0.5, 1.3, -0.2)
    assert psnr_y(overshot, original, border=0) == math.inf
    assert psnr_y(original + 0.3 / 255, original, border=0) == math.inf


def test_what_lies_in_the_border_does_not_count() -> None:
    altered, original = pair(7)
    framed = altered.copy()
    framed[:2], framed[-2:], framed[:, :2], framed[:, -2:] = 0, 255, 0, 255
    assert psnr_y(to_tensor(framed), to_tensor(original), border=2) == psnr_y(
        to_tensor(altered), to_tensor(original), border=2
    )


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        psnr_y(torch.zeros(3, 8, 8), torch.zeros(3, 8, 9), border=0)
    with pytest.raises(ValueError, match="border 4 leaves nothing of an image of 9x8 pixels"):
        psnr_y(torch.zeros(3, 8, 9), torch.zeros(3, 8, 9), border=4)
