"""How the climate segmentation is trained on synthetic maps, and judged."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket.workloads._workload import Batch, BundledWorkload
from hocket.workloads.climate import data
from hocket.workloads.climate.model import UNet
from hocket.workloads.climate.settings import SIZES, ClimateSettings

HELD_OUT = 128
_HELD_OUT_SEED = 1_000_003  # not the training's
_MAPS_PER_BATCH = 16
_THRESHOLDS = np.linspace(0.5, 4.0, 15)


class ClimateWorkload(BundledWorkload[ClimateSettings]):
    """Cross entropy of each pixel, in which rare classes weigh more; Adam with a warm-up and a cosine."""

    warm_up_steps = 20

    def model(self) -> UNet:
        """Return a U-Net of the chosen size."""
        return UNet(len(data.CHANNELS), len(data.CLASSES), size=self.settings.size)

    def dataset(self) -> Dataset[Batch]:
        """Return maps drawn on the fly."""
        recipe = SIZES[self.settings.size]
        return cast(Dataset[Batch], data.Maps(recipe.height, recipe.breadth, seed=self.settings.seed))

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over pixels of cross entropy times the class's weight.

        A class weighs by the inverse square root of its share of pixels (Kurth et al. 2018).
        """
        output = output.float()
        weight = torch.tensor(data.SHARES, dtype=output.dtype, device=output.device).rsqrt()
        return F.cross_entropy(output, target, weight=weight, reduction="none").mean()

    def _judge(self, model: nn.Module, device: torch.device, picture: Path | None) -> dict[str, Any]:
        """Return intersection over union on maps that were never trained on, shared out among the workers.

        Beside it what one threshold for each class can do: low pressure makes a cyclone, moisture a river; of all
        thresholds those that are best on these very maps.
        """
        classes = len(data.CLASSES)
        recipe = SIZES[self.settings.size]
        maps = data.Maps(recipe.height, recipe.breadth, seed=_HELD_OUT_SEED, length=HELD_OUT)
        tables = torch.zeros((1 + len(_THRESHOLDS) ** 2, classes, classes), dtype=torch.int64)
        pressure, moisture = data.CHANNELS.index("PSL"), data.CHANNELS.index("TMQ")
        for fields, labels in hocket.shard(DataLoader(cast(Dataset[Batch], maps), batch_size=_MAPS_PER_BATCH)):
            truth = labels.numpy()
            told = model(fields.to(device)).argmax(1).cpu().numpy()
            tables[0] += torch.from_numpy(confusion(truth, told, classes))
            low, wet = -fields[:, pressure].numpy(), fields[:, moisture].numpy()
            for i, (deep, moist) in enumerate(np.ndindex(len(_THRESHOLDS), len(_THRESHOLDS))):
                simple = np.where(low > _THRESHOLDS[deep], 1, np.where(wet > _THRESHOLDS[moist], 2, 0))
                tables[1 + i] += torch.from_numpy(confusion(truth, simple, classes))
        tables = hocket.total(tables)
        network, *simple_ones = [100.0 * intersection_over_union(table.numpy()) for table in tables]
        best = max(simple_ones, key=lambda one: float(one.mean()))
        rows: list[dict[str, Any]] = [
            {"class": name, "thresholds": float(best[i]), "network": float(network[i])}
            for i, name in enumerate(data.CLASSES)
        ]
        mean = {key: sum(row[key] for row in rows) / classes for key in ("thresholds", "network")}
        return {
            "title": f"Intersection over union in percent, {HELD_OUT} synthetic maps held out",
            "columns": {"class": "class", "thresholds": "best thresholds", "network": "U-Net"},
            "rows": rows,
            "mean": mean,
            "summary": (
                f"The mean intersection over union is {mean['network']:.1f}%; thresholds of pressure and moisture "
                f"reach {mean['thresholds']:.1f}%"
            ),
        }


def confusion(truth: npt.NDArray[np.int64], told: npt.NDArray[np.int64], classes: int) -> npt.NDArray[np.int64]:
    """Return the counts of pixels by class (rows) and by what was said of them (columns)."""
    flat = truth.reshape(-1) * classes + told.reshape(-1)
    return np.bincount(flat, minlength=classes**2).reshape(classes, classes)


def intersection_over_union(table: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """For each class the pixels that are of it and said to be, by those that are or are said to be; NaN where none is.

    `table` is the sum of `confusion` over all maps.
    """
    both = np.diag(table).astype(np.float64)
    either = table.sum(0) + table.sum(1) - both
    found: npt.NDArray[np.float64] = np.full(len(both), np.nan)
    np.divide(both, either, out=found, where=either > 0)
    return found
