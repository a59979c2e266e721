"""How CosmoFlow is trained on synthetic universes, and judged."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket.workloads._drawn import Numbered
from hocket.workloads._workload import Batch, BundledWorkload
from hocket.workloads.cosmoflow import data
from hocket.workloads.cosmoflow.model import CosmoFlow
from hocket.workloads.cosmoflow.settings import SIZES, CosmoFlowSettings

HELD_OUT = {"full": 256, "demo": 256, "tiny": 64}
_HELD_OUT_SEED = 1_000_003  # not the training's
_VOLUMES_PER_BATCH = 16
_MOMENTS = 3


class CosmoFlowWorkload(BundledWorkload[CosmoFlowSettings]):
    """Mean squared error of both parameters; Adam, whose learning rate rises and falls along a cosine."""

    warm_up_steps = 20

    def model(self) -> CosmoFlow:
        """CosmoFlow of the chosen size."""
        return CosmoFlow(parameters=len(data.NAMES), size=self.settings.size)

    def dataset(self) -> Dataset[Batch]:
        """Return universes made on the fly."""
        return cast(Dataset[Batch], data.Universes(SIZES[self.settings.size].side, seed=self.settings.seed))

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean squared error over parameters and volumes."""
        return F.mse_loss(output.float(), target)

    def _judge(self, model: nn.Module, device: torch.device, picture: Path | None) -> dict[str, Any]:
        """Mean absolute errors on universes that were never trained on, shared out among the workers.

        Beside them two things that need no network: to say the middle of the range, and a linear fit of mean and spread
        of the cells, made on as many other universes.
        """
        count = HELD_OUT[self.settings.size]
        universes = data.Universes(SIZES[self.settings.size].side, seed=_HELD_OUT_SEED, length=2 * count)
        table = torch.zeros((2 * count, 2 * len(data.NAMES) + _MOMENTS), dtype=torch.float64)
        for index, volumes, targets in hocket.shard(DataLoader(Numbered(universes), _VOLUMES_PER_BATCH)):
            told = model(volumes.to(device)).double().cpu()
            cells = volumes.double().flatten(2)
            ones = torch.ones(len(index), 1, dtype=torch.float64)
            table[index] = torch.cat([told, targets.double(), ones, cells.mean(2), cells.std(2)], 1)
        told, truth, moments = np.split(hocket.total(table).numpy(), (2, 4), axis=1)
        fit = np.linalg.lstsq(moments[count:], truth[count:], rcond=None)[0]
        told, truth, fitted = told[:count], truth[:count], moments[:count] @ fit
        rows: list[dict[str, Any]] = [
            {
                "parameter": name,
                "middle": float(np.abs(truth[:, i]).mean()),
                "fit": float(np.abs(fitted[:, i] - truth[:, i]).mean()),
                "network": float(np.abs(told[:, i] - truth[:, i]).mean()),
            }
            for i, name in enumerate(data.NAMES)
        ]
        mean = {key: sum(row[key] for row in rows) / len(rows) for key in ("middle", "fit", "network")}
        return {
            "title": f"Mean absolute error of parameters scaled to [-1, 1], {count} synthetic universes held out",
            "columns": {
                "parameter": "parameter",
                "middle": "middle of the range",
                "fit": "fit of mean and spread",
                "network": "CosmoFlow",
            },
            "rows": rows,
            "mean": mean,
            "summary": (
                f"The mean absolute error is {mean['network']:.3f}; a fit of the cells' mean and spread has "
                f"{mean['fit']:.3f}, the middle of the range {mean['middle']:.3f}"
            ),
        }
