"""Small models as a user would write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor


def mlp() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(7)], nn.Linear(12, 5))


def mlp_batch(step: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, 12, generator=generator), torch.randint(0, 5, (samples,), generator=generator)


Make = tuple[Callable[[], nn.Module], Callable[[int, int], tuple[Any, ...]], Callable[[Any, Tensor], Tensor]]

MODELS: dict[str, Make] = {
    "mlp": (mlp, mlp_batch, nn.functional.cross_entropy),
}
