"""ResNet-50, version 1.5.

He, Zhang, Ren, Sun 2015 (arXiv:1512.03385), table 1. In version 1.5 the stride of a bottleneck sits in its 3x3
convolution instead of its first 1x1, as MLPerf and most published throughputs have it.
"""

import torch
from torch import Tensor, nn

# Bottlenecks in each of the four stages; channels of their 3x3 convolutions in the first; and what their last
# convolution multiplies these by.
DEPTHS = (3, 4, 6, 3)
WIDTH = 64
EXPANSION = 4


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, each with batch normalisation, beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.reduce = nn.Sequential(_convolution(inputs, width, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.middle = nn.Sequential(_convolution(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.expand = nn.Sequential(_convolution(width, outputs, 1), nn.BatchNorm2d(outputs))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, inputs, H, W) to (N, 4 * width, H / stride, W / stride)."""
        return torch.relu(self.expand(self.middle(self.reduce(x))) + self.shortcut(x))


class ResNet(nn.Module):
    """(N, 3, H, W) images to (N, classes) scores, by four stages of bottlenecks.

    `width` is the channels of the 3x3 convolutions in the first stage; each stage has twice as many as the one before.
    """

    def __init__(self, depths: tuple[int, int, int, int], *, classes: int = 1000, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolution(3, width, 7, stride=2),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        inputs = width
        for stage, depth in enumerate(depths):
            for index in range(depth):
                blocks.append(Bottleneck(inputs, width << stage, stride=2 if stage > 0 and index == 0 else 1))
                inputs = (width << stage) * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Score each class."""
        features: Tensor = self.blocks(self.stem(images))
        scores: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return scores


class ResNet50(ResNet):
    """(N, 3, H, W) images to (N, classes) scores; 25,557,032 parameters for 1,000 classes."""

    def __init__(self, classes: int = 1000, *, width: int = WIDTH) -> None:
        super().__init__(DEPTHS, classes=classes, width=width)
