"""EDSR: enhanced deep residual networks for single-image super-resolution.

Lim, Son, Kim, Nah, Lee, CVPR workshops 2017 (arXiv:1707.02921). The network is a residual network without batch
normalisation: one convolution into feature space, B residual blocks between a long skip connection, a pixel-shuffle
upsampler, one convolution back to colour.
"""

import torch
from torch import Tensor, nn

from hocket.workloads.edsr.settings import SCALES, SIZES, Size

# Mean colour of DIV2K, the paper's training set; subtracted at the input and added back at the output.
RGB_MEAN = (0.4488, 0.4371, 0.4040)


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=3, padding=1)


class ResidualBlock(nn.Module):
    """Convolution, ReLU, convolution, times ``residual_scale``, plus the input. Shape (N, F, H, W) is kept."""

    def __init__(self, features: int, residual_scale: float) -> None:
        super().__init__()
        self.first = _convolution(features, features)
        self.second = _convolution(features, features)
        self.residual_scale = residual_scale

    def forward(self, x: Tensor) -> Tensor:
        """Add the scaled residual to ``x``."""
        residual: Tensor = self.second(torch.relu(self.first(x)))
        if self.residual_scale != 1.0:
            residual = residual * self.residual_scale
        return x + residual


def _upsampler(features: int, scale: int) -> nn.Sequential:
    """Return the pixel shuffle by ``scale``: in one stage for 2 and 3, in two stages of 2 for 4."""
    stages = [2, 2] if scale == 4 else [scale]
    layers: list[nn.Module] = []
    for factor in stages:
        layers += [_convolution(features, features * factor**2), nn.PixelShuffle(factor)]
    return nn.Sequential(*layers)


class EDSR(nn.Module):
    """The network; images are RGB in [0, 1], (N, 3, H, W) in and (N, 3, scale*H, scale*W) out.

    Args:
        size: One of `SIZES`, or a `Size` of your own.
        scale: 2, 3 or 4.

    Raises:
        ValueError: If ``scale`` is not 2, 3 or 4, or ``size`` has no such name.
    """

    def __init__(self, size: str | Size = "baseline", scale: int = 2) -> None:
        super().__init__()
        if scale not in SCALES:
            raise ValueError(f"EDSR: scale {scale} is not one of {', '.join(map(str, SCALES))}")
        if isinstance(size, str):
            if size not in SIZES:
                raise ValueError(f"EDSR: size {size!r} is not one of {', '.join(SIZES)}")
            size = SIZES[size]
        self.scale = scale
        self.head = _convolution(3, size.features)
        self.body = nn.Sequential(
            *(ResidualBlock(size.features, size.residual_scale) for _ in range(size.blocks)),
            _convolution(size.features, size.features),
        )
        self.upsampler = _upsampler(size.features, scale)
        self.tail = _convolution(size.features, 3)

    def forward(self, image: Tensor) -> Tensor:
        """Magnify a batch of images."""
        # A constant: no parameter, and no buffer either, since buffers are sent from worker to worker in training.
        mean = image.new_tensor(RGB_MEAN).view(1, 3, 1, 1)
        features = self.head(image - mean)
        features = features + self.body(features)
        magnified: Tensor = self.tail(self.upsampler(features))
        return magnified + mean


@torch.no_grad()
def start_as_magnifier(model: EDSR) -> None:
    """Initialise ``model`` so that it begins as a nearest-neighbour magnifier, and learns from there.

    The first three features carry red, green and blue from the head to the tail; the pixel shuffle repeats them
    (every sub-pixel of a feature starts with the same kernel, as in ICNR, Aitken et al. 2017, arXiv:1707.02937); the
    long skip connection starts with nothing beside it (as the residual branches of Goyal et al. 2017,
    arXiv:1706.02677, section 5.1). The architecture stays EDSR's and every weight stays free to move. With torch's
    default initialisation the first thousand steps go into learning to copy the image.
    """
    nn.init.zeros_(model.body[-1].weight)  # type: ignore[arg-type]
    nn.init.zeros_(model.body[-1].bias)  # type: ignore[arg-type]
    nn.init.zeros_(model.tail.weight)
    nn.init.zeros_(model.tail.bias)  # type: ignore[arg-type]
    model.head.weight[:3].zero_()
    model.head.bias[:3].zero_()  # type: ignore[index]
    stages = [layer for layer in model.upsampler if isinstance(layer, nn.Conv2d)]
    for stage in stages:
        repeats = stage.out_channels // stage.in_channels
        stage.weight.copy_(stage.weight[::repeats].repeat_interleave(repeats, dim=0))
        nn.init.zeros_(stage.bias)  # type: ignore[arg-type]
        stage.weight[: 3 * repeats].zero_()
    for colour in range(3):
        model.head.weight[colour, colour, 1, 1] = 1.0
        model.tail.weight[colour, colour, 1, 1] = 1.0
        for stage in stages:
            repeats = stage.out_channels // stage.in_channels
            stage.weight[colour * repeats : (colour + 1) * repeats, colour, 1, 1] = 1.0
