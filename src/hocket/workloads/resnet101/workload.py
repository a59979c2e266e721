"""How ResNet-101 is trained on composed images, and judged."""

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket.workloads._drawn import Numbered
from hocket.workloads._workload import Batch, BundledWorkload
from hocket.workloads.resnet101 import data
from hocket.workloads.resnet101.model import ResNet101
from hocket.workloads.resnet101.settings import ResNet101Settings

HELD_OUT = 500
_HELD_OUT_SEED = 1_000_003  # not the training's: other compositions, of other digits
_IMAGES_PER_BATCH = 100


class ResNet101Workload(BundledWorkload[ResNet101Settings]):
    """Binary cross entropy of each label; SGD with momentum, whose learning rate rises and falls along a cosine."""

    warm_up_steps = 50

    def __init__(self, settings: ResNet101Settings) -> None:
        super().__init__(settings)
        self._training, self._held_out = data.load()

    def model(self) -> ResNet101:
        """ResNet-101 of the chosen size, one score for each digit."""
        return ResNet101(data.LABELS, size=self.settings.size)

    def optimizer(self, model: nn.Module) -> torch.optim.SGD:
        """Momentum 0.9 and weight decay 1e-4, as in He et al. 2015."""
        return torch.optim.SGD(model.parameters(), lr=self.settings.lr, momentum=0.9, weight_decay=1e-4)

    def dataset(self) -> Dataset[Batch]:
        """Return compositions of the training digits."""
        return cast(
            Dataset[Batch], data.Compositions(self._training, self.settings.image_size, seed=self.settings.seed)
        )

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        """Binary cross entropy, the mean over labels and images."""
        return F.binary_cross_entropy_with_logits(output.float(), target)

    def _judge(self, model: nn.Module, device: torch.device, picture: Path | None) -> dict[str, Any]:
        """Average precision of each label on images of held-out digits, shared out among the workers."""
        images = data.Compositions(self._held_out, self.settings.image_size, seed=_HELD_OUT_SEED, length=HELD_OUT)
        table = torch.zeros((HELD_OUT, 2, data.LABELS), dtype=torch.float64)
        numbered = DataLoader(Numbered(images), batch_size=_IMAGES_PER_BATCH)
        for index, pixels, labels in hocket.shard(numbered):
            table[index, 0] = model(pixels.to(device)).double().cpu()
            table[index, 1] = labels.double()
        scores, occurs = hocket.total(table).numpy().transpose(1, 0, 2)
        rows: list[dict[str, Any]] = [
            {
                "digit": str(digit),
                "chance_percent": 100.0 * float(occurs[:, digit].mean()),
                "precision_percent": 100.0 * average_precision(scores[:, digit], occurs[:, digit] > 0.5),
            }
            for digit in range(data.LABELS)
        ]
        mean = {key: sum(row[key] for row in rows) / len(rows) for key in ("chance_percent", "precision_percent")}
        return {
            "title": f"Average precision, {HELD_OUT} images composed of digits that were held out",
            "columns": {"digit": "digit", "chance_percent": "chance (%)", "precision_percent": "ResNet-101 (%)"},
            "rows": rows,
            "mean": mean,
            "summary": (
                f"The mean average precision is {mean['precision_percent']:.1f}%; ranking by chance gives "
                f"{mean['chance_percent']:.1f}%"
            ),
        }


def average_precision(scores: npt.NDArray[np.float64], occurs: npt.NDArray[np.bool_]) -> float:
    """Mean, over the images where a label occurs, of the precision among the images ranked not below.

    Args:
        scores: One per image, (n,); images of equal score are ranked together.
        occurs: Whether the label occurs, (n,).

    Returns:
        In (0, 1]; NaN where the label occurs nowhere.
    """
    if not occurs.any():
        return math.nan
    order = np.argsort(-scores, kind="stable")
    ranked, found = scores[order], np.cumsum(occurs[order])
    last_of_equals = np.searchsorted(-ranked, -ranked, side="right") - 1
    precision = found[last_of_equals] / (last_of_equals + 1)
    return float(precision[occurs[order]].mean())
