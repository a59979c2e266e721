"""A small U-Net (Ronneberger et al. 2015) with batch norm: a score of each class for each pixel of a map."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.workloads.climate.settings import SIZES


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    """Return two 3 x 3 convolutions, each with batch norm and a rectifier."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """(N, channels, H, W) maps to (N, classes, H, W) scores; H and W are multiples of 2 to the power of the levels.

    `size` is one of `SIZES`.
    """

    def __init__(self, channels: int = 16, classes: int = 3, *, size: str = "full") -> None:
        super().__init__()
        recipe = SIZES[size]
        widths = [recipe.width << level for level in range(recipe.levels + 1)]
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip([channels, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in reversed(widths[:-1]))
        self.after = nn.ModuleList(_twice(2 * width, width) for width in reversed(widths[:-1]))
        self.head = nn.Conv2d(recipe.width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes for each pixel."""
        kept: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for level, (up, block) in enumerate(zip(self.up, self.after, strict=True)):
            x = block(torch.cat([kept[-2 - level], up(x)], dim=1))
        scores: Tensor = self.head(x)
        return scores
