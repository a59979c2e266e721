"""Convolutional networks as users write them, with data for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.planner import Plan

SAMPLES = 11
BATCH = 4
EPOCHS = 3


def double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding="same"),
        nn.GroupNorm(2, outputs),
        nn.SiLU(),
    )


class UNet(nn.Module):
    """Ronneberger et al. 2015, with the usual code for odd sizes, and both ways to upsample."""

    def __init__(self, channels: int = 3, classes: int = 3, width: int = 4) -> None:
        super().__init__()
        self.first, self.second, self.third = double(channels, width), double(width, 2 * width), double(2 * width, 8)
        self.up = nn.ConvTranspose2d(8, width, 2, stride=2)
        self.after, self.last = double(3 * width, width), double(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.first(x)
        two = self.second(F.max_pool2d(one, 2))
        three = self.third(F.avg_pool2d(two, 2))
        up = self.up(three)
        missing = [two.size(2) - up.size(2), two.size(3) - up.size(3)]
        up = F.pad(up, [missing[1] // 2, missing[1] - missing[1] // 2, missing[0] // 2, missing[0] - missing[0] // 2])
        up = self.after(torch.cat([two, up], dim=1))
        up = F.interpolate(up, size=one.shape[2:], mode="bilinear", align_corners=False)
        return self.head(self.last(torch.cat([one, up], dim=1)))


class Excited(nn.Module):
    """A residual block whose channels are weighed by their means (Hu et al. 2017)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm3d(width)
        self.weigh = nn.Sequential(nn.Linear(width, 2), nn.ReLU(), nn.Linear(2, width), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        weights = self.weigh(y.mean((2, 3, 4)))
        return F.relu(x + y * weights[:, :, None, None, None])


class Volumes(nn.Module):
    """Regression of volumes, with a head of dense layers as CosmoFlow's."""

    def __init__(self, depth: int = 9) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.LeakyReLU(), nn.MaxPool3d(2, ceil_mode=True))
        self.block = Excited(4)
        self.place = nn.Parameter(torch.zeros(1, 4, (depth + 1) // 2, 1, 1))
        self.down = nn.Conv3d(4, 6, 3, stride=2, padding=1)
        rows = ((depth + 1) // 2 + 1) // 2
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(6 * rows * 4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.block(self.stem(x)) + self.place))


class Weighted(nn.Module):
    """Cross entropy whose classes weigh differently, and a term that no rule knows."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weight = torch.tensor([0.2, 1.0, 3.0], dtype=output.dtype)
        each = F.cross_entropy(output, target, reduction="none") * weight[target]
        return each.mean() + 1e-2 * (output.softmax(1)[:, 1].var((1, 2)).mean() + output.logsumexp((1, 2)).mean())


def setting(name: str) -> tuple[nn.Module, TensorDataset, Callable[..., torch.Tensor]]:
    torch.manual_seed(3)
    if name == "unet":
        x, y = torch.randn(SAMPLES, 3, 13, 10), torch.randint(0, 3, (SAMPLES, 13, 10))
        model, loss_fn = UNet(), Weighted()
    elif name == "volumes":
        x, y = torch.randn(SAMPLES, 2, 9, 8, 8), torch.randn(SAMPLES, 2)
        model, loss_fn = Volumes(), nn.MSELoss()
    else:
        raise ValueError(name)
    return model.double(), TensorDataset(x.double(), y.double() if y.is_floating_point() else y), loss_fn


def train(name: str, plan: Plan, optimizer_name: str = "SGD") -> dict[str, Any]:
    """Losses, an evaluation, the gradient's norms, weights and buffers at the end, and what the trainer says."""
    model, data, loss_fn = setting(name)
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if optimizer_name == "SGD"
        else torch.optim.Adam(model.parameters(), lr=3e-3)
    )
    trainer = hocket.Trainer(model, loss_fn, optimizer, plan)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    losses, norms = [], []
    for _ in range(EPOCHS):
        for batch in trainer.batches(loader):
            losses.append(float(trainer.step(batch)))
            norms.append(trainer.grad_norm)
    evaluated = trainer.evaluate(DataLoader(data, batch_size=3), lambda o, t: (o.float() ** 2).mean())
    model.eval()
    with torch.no_grad():
        output = model(data.tensors[0][:2])
    state = {k: v.clone() for k, v in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "evaluated": evaluated, "output": output, "state": state,
            "report": trainer.report()}  # fmt: skip


def train_all(runs: list[tuple[str, Plan, str]]) -> list[dict[str, Any]]:
    """Several runs in one world."""
    return [train(*run) for run in runs]


def guarded(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A mean by hand over the pixels that have a label."""
    mask = (target != 2).to(output.dtype)
    return (F.cross_entropy(output, target, reduction="none") * mask).sum() / mask.sum().clamp(min=1)


LABEL_LOSSES = {
    "ignoring": nn.CrossEntropyLoss(ignore_index=2),
    "weighted": nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 3.0]).double(), label_smoothing=0.1),
    "guarded": guarded,
}


def train_on_labels(plan: Plan) -> dict[str, list[float]]:
    """Losses of batches of which the first has all labels, the second a part without any, the last one few rows."""
    found = {}
    for name, loss_fn in LABEL_LOSSES.items():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)).double()
        trainer = hocket.Trainer(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), plan)
        inputs, labels = torch.randn(3, BATCH, 2, 9, 5).double(), torch.randint(0, 3, (3, BATCH, 9, 5))
        labels[0] = labels[0].clamp(max=1)
        labels[1, : BATCH // 2] = 2
        labels[2, :, 1:] = 2
        found[name] = [float(trainer.step(batch)) for batch in zip(inputs, labels, strict=True)]
    return found
