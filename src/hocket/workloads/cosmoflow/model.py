"""CosmoFlow (Mathuriya et al. 2018, arXiv:1808.04728) in the form of MLPerf HPC: convolutions and a dense head."""

import torch
from torch import Tensor, nn

from hocket.workloads.cosmoflow.settings import SIZES

_SLOPE = 0.3  # of leaky rectifiers for negative values
_BOUND = 1.2  # outputs lie in (-1.2, 1.2): a little beyond the targets


class CosmoFlow(nn.Module):
    """(N, channels, side, side, side) volumes to (N, parameters) in (-1.2, 1.2). `size` is one of `SIZES`."""

    def __init__(self, channels: int = 1, parameters: int = 2, *, size: str = "full") -> None:
        super().__init__()
        recipe = SIZES[size]
        layers: list[nn.Module] = []
        for number in range(1, recipe.layers + 1):
            layers += [nn.Conv3d(channels, recipe.width * number, 3, padding=1), nn.LeakyReLU(_SLOPE), nn.MaxPool3d(2)]
            channels = recipe.width * number
        self.features = nn.Sequential(*layers)
        features = channels * (recipe.side >> recipe.layers) ** 3
        first, second = recipe.dense
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(features, first),
            nn.LeakyReLU(_SLOPE),
            nn.Dropout(recipe.dropout),
            nn.Linear(first, second),
            nn.LeakyReLU(_SLOPE),
            nn.Dropout(recipe.dropout),
            nn.Linear(second, parameters),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the parameters of each volume."""
        return _BOUND * torch.tanh(self.head(self.features(x)))
