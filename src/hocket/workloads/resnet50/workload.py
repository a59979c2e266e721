"""How ResNet-50 is trained on made-up images."""

from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from hocket.workloads._workload import Batch, BundledWorkload
from hocket.workloads.resnet50.data import SyntheticImages
from hocket.workloads.resnet50.model import ResNet50
from hocket.workloads.resnet50.settings import IMAGES_PER_EPOCH, WIDTHS, ResNet50Settings


class ResNet50Workload(BundledWorkload[ResNet50Settings]):
    """Cross entropy and SGD with momentum at a constant rate: there is a throughput to see, nothing to learn."""

    evaluates = False

    def model(self) -> ResNet50:
        """ResNet-50 for 1,000 classes, or the narrow one."""
        return ResNet50(width=WIDTHS[self.settings.size])

    def optimizer(self, model: nn.Module) -> torch.optim.SGD:
        """Momentum 0.9 and weight decay 1e-4, as in He et al. 2015."""
        return torch.optim.SGD(model.parameters(), lr=self.settings.lr, momentum=0.9, weight_decay=1e-4)

    def learning_rate(self, step: int) -> float:
        """Return a constant learning rate."""
        return self.settings.lr

    def dataset(self) -> Dataset[Batch]:
        """Noise of the chosen size."""
        return cast(
            Dataset[Batch], SyntheticImages(IMAGES_PER_EPOCH, self.settings.image_size, seed=self.settings.seed)
        )

    def start_epoch(self, dataset: Dataset[Batch], epoch: int) -> None:
        """Move on to an epoch; every one is the same."""

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(output.float(), target)

    def _judge(self, model: nn.Module, device: torch.device, picture: Path | None) -> dict[str, Any]:
        """Noise cannot be classified."""
        raise NotImplementedError("ResNet-50 on made-up images has nothing to judge")
