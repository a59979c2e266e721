"""PSNR as the super-resolution literature reports it: on luma, without the border."""

import math

import torch
from torch import Tensor

# ITU-R BT.601, studio range: black is 16 and white 235 when R, G, B run from 0 to 255.
_LUMA = (65.481, 128.553, 24.966)


def luma(image: Tensor) -> Tensor:
    """Return the Y channel of BT.601 in 16..235, float64 (..., H, W), of RGB in [0, 1], (..., 3, H, W)."""
    weights = torch.tensor(_LUMA, dtype=torch.float64, device=image.device).view(3, 1, 1)
    return 16.0 + (image.to(torch.float64) * weights).sum(dim=-3)


def quantise(image: Tensor) -> Tensor:
    """Return the image as a viewer would get it: clipped to [0, 1] and rounded to 256 levels."""
    return (image.clamp(0.0, 1.0) * 255.0).round() / 255.0


def psnr_y(image: Tensor, reference: Tensor, *, border: int) -> float:
    """Return the peak signal-to-noise ratio of luma in dB, with peak 255.

    Args:
        image: RGB in [0, 1], (3, H, W); compared as it would be stored, in 8 bits.
        reference: The original, of the same shape.
        border: Pixels shaved on each side, by custom the scale: they depend on pixels outside the image.

    Returns:
        dB; infinity if nothing differs.

    Raises:
        ValueError: If the shapes differ or nothing is left inside the border.
    """
    if image.shape != reference.shape:
        raise ValueError(f"psnr_y: image {tuple(image.shape)} and reference {tuple(reference.shape)} differ in shape")
    height, width = image.shape[-2:]
    if border < 0 or min(height, width) <= 2 * border:
        raise ValueError(f"psnr_y: border {border} leaves nothing of an image of {width}x{height} pixels")
    inside = (..., slice(border, height - border), slice(border, width - border))
    difference = luma(quantise(image))[inside] - luma(quantise(reference))[inside]
    mean_square = difference.square().mean().item()
    return math.inf if mean_square == 0.0 else 10.0 * math.log10(255.0**2 / mean_square)
