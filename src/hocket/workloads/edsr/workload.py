"""How EDSR is trained and judged."""

from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket.workloads._workload import Batch, BundledWorkload
from hocket.workloads.edsr import photographs
from hocket.workloads.edsr.data import HeldOut, Patches, to_pixels, to_tensor
from hocket.workloads.edsr.metrics import psnr_y
from hocket.workloads.edsr.model import EDSR, start_as_magnifier
from hocket.workloads.edsr.photographs import Photograph
from hocket.workloads.edsr.picture import Panel, draw, hardest_crop
from hocket.workloads.edsr.settings import EdsrSettings

_CROP_SIDE = 96  # pixels of the original shown in the picture


class EdsrWorkload(BundledWorkload[EdsrSettings]):
    """L1 loss and Adam as in the paper; the learning rate rises over a hundred steps and falls along a cosine."""

    warm_up_steps = 100

    def model(self) -> EDSR:
        """EDSR of the chosen size, started as a nearest-neighbour magnifier."""
        model = EDSR(self.settings.size, self.settings.scale)
        start_as_magnifier(model)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Adam:
        """Adam with the paper's constants."""
        return torch.optim.Adam(model.parameters(), lr=self.settings.lr, betas=(0.9, 0.999), eps=1e-8)

    def dataset(self) -> Dataset[Batch]:
        """Return random patches of the training photographs."""
        training = [Photograph.load(name, self.settings.scale) for name in photographs.TRAINING]
        return cast(Dataset[Batch], Patches(training, self.settings.patch, seed=self.settings.seed))

    def loss_fn(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean absolute difference of colours in [0, 1]."""
        return F.l1_loss(output.float(), target)

    def _judge(self, model: nn.Module, device: torch.device, picture: Path | None) -> dict[str, Any]:
        """PSNR of each held-out photograph, the photographs shared out among the workers."""
        scale = self.settings.scale
        held_out = HeldOut([Photograph.load(name, scale) for name in photographs.HELD_OUT])
        table = torch.zeros((len(held_out), 2), dtype=torch.float64)
        # One batch of all photographs, as a list because their sizes differ: each worker gets its part of it.
        loader = DataLoader(held_out, batch_size=len(held_out), collate_fn=list)
        for part in hocket.shard(loader):
            for index, low, bicubic, high in part:
                magnified = model(low[None].to(device))[0].cpu()
                table[index, 0] = psnr_y(bicubic, high, border=scale)
                table[index, 1] = psnr_y(magnified, high, border=scale)
        table = hocket.total(table)
        rows = [
            {"photograph": photograph.name, "bicubic_dB": bicubic, "edsr_dB": edsr, "gain_dB": edsr - bicubic}
            for photograph, (bicubic, edsr) in zip(held_out.photographs, table.tolist(), strict=True)
        ]
        mean = {key: sum(row[key] for row in rows) / len(rows) for key in ("bicubic_dB", "edsr_dB", "gain_dB")}
        if picture is not None:
            self._draw(model, held_out, rows, picture)
        return {
            "title": f"PSNR of luma, held-out photographs, x{scale}",
            "columns": {
                "photograph": "photograph",
                "bicubic_dB": "bicubic (dB)",
                "edsr_dB": "EDSR (dB)",
                "gain_dB": "gain (dB)",
            },
            "rows": rows,
            "mean": mean,
            "summary": (
                f"EDSR is {abs(mean['gain_dB']):.2f} dB {'above' if mean['gain_dB'] > 0 else 'below'} bicubic "
                "on photographs it has never seen"
            ),
        }

    def _draw(self, model: nn.Module, held_out: HeldOut, rows: list[dict[str, Any]], path: Path) -> None:
        """Draw low resolution, bicubic, EDSR and original of the hardest crop of the first held-out photograph."""
        scale = self.settings.scale
        photograph, row = held_out.photographs[0], rows[0]
        side = _CROP_SIDE - _CROP_SIDE % scale
        bicubic = photograph.bicubic()
        top, left = (corner - corner % scale for corner in hardest_crop(bicubic, photograph.high, side))
        here = (slice(top, top + side), slice(left, left + side))
        low_here = tuple(slice(axis.start // scale, axis.stop // scale) for axis in here)
        low = to_tensor(photograph.low)[None].to(next(model.parameters()).device)
        magnified = to_pixels(model(low)[0])
        original_caption = f"{photograph.name}, {photograph.high.shape[1]}x{photograph.high.shape[0]}"
        draw(
            [
                Panel(photograph.low[low_here], "low resolution", f"{side // scale}x{side // scale} pixels"),
                Panel(bicubic[here], "bicubic", f"{row['bicubic_dB']:.2f} dB over the photograph"),
                Panel(magnified[here], "EDSR", f"{row['edsr_dB']:.2f} dB over the photograph"),
                Panel(photograph.high[here], "original", original_caption),
            ],
            f"EDSR {self.settings.size} x{scale}, a photograph it has never seen, where bicubic errs most",
            path,
        )
