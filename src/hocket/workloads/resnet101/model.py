"""ResNet-101, version 1.5: `hocket.workloads.resnet50.model` with a deeper third stage, one score for each label."""

from hocket.workloads.resnet50.model import ResNet
from hocket.workloads.resnet101.settings import SIZES


class ResNet101(ResNet):
    """(N, 3, H, W) images to (N, labels) scores; 44,549,160 parameters for 1,000 labels.

    Each score stands for itself; `size` is one of `SIZES`.
    """

    def __init__(self, labels: int = 1000, *, size: str = "full") -> None:
        recipe = SIZES[size]
        super().__init__(recipe.depths, classes=labels, width=recipe.width)
