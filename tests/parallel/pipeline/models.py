"""Models for the tests of the pipeline: the five users' models, and small ones with one difficulty each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .. import user_models

Tensor = torch.Tensor


def mlp() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(7)], nn.Linear(12, 5))


class Recurrent(nn.Module):
    """Tuples, whole numbers and parameters of its own between its layers; a weight that is used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.first = nn.LSTM(8, 8, batch_first=True)
        self.scale = nn.Parameter(torch.ones(8))
        self.mix = nn.Linear(8, 8)
        self.second = nn.LSTM(8, 8, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(11))

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        lengths = (words != 0).sum(1)
        output, (h, c) = self.first(self.table(words))
        output = self.mix(F.relu_(self.mix(output * self.scale)))
        output, _ = self.second(output, (h, c))
        last = output[torch.arange(len(words)), lengths - 1]
        return {"logits": F.linear(last, self.table.weight, self.bias), "lengths": lengths}


def recurrent_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"], target)


class Frozen(nn.Module):
    """No gradient flows back over some cuts, and none at all into its first layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
        self.features.requires_grad_(False)
        self.heads = nn.ModuleList([nn.Linear(12, 12) for _ in range(5)])
        self.last = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        fixed = y = self.features(x)
        for head in self.heads:
            y = y + torch.relu(head(y))
        return self.last(torch.cat([fixed, y], 1))


def frozen_norms(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = make()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return model

    return made


class Model(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], tuple[Any, ...]]
    loss_fn: Callable[[Any, Any], Tensor]

    def batch_of(self, step: int, samples: int) -> tuple[Any, ...]:
        parts = self.batch(samples, torch.Generator().manual_seed(step))
        return tuple(part.double() if part.is_floating_point() else part for part in parts)

    def made(self) -> nn.Module:
        """In double precision: an Adam that divides rounding errors by their size is no judge of a pipeline."""
        return self.make().double()


def vectors(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(n, 12, generator=g), torch.randint(0, 5, (n,), generator=g)


def words(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randint(1, 11, (n, 6), generator=g), torch.randint(0, 11, (n,), generator=g)


MODELS: dict[str, Model] = {
    "mlp": Model(mlp, vectors, F.cross_entropy),
    "recurrent": Model(Recurrent, words, recurrent_loss),
    "frozen": Model(Frozen, vectors, F.cross_entropy),
    **{name: Model(c.model, c.batch, c.loss_fn) for name, c in user_models.CASES.items()},
    **{
        f"{name}, frozen norms": Model(frozen_norms(c.model), c.batch, c.loss_fn)
        for name, c in user_models.CASES.items()
        if name in ("cnn", "unet")
    },
}
