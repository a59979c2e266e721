"""What a run of CosmoFlow can be told."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hocket.workloads._settings import Recipe, SizedSettings

VOLUMES_PER_EPOCH = 4096


@dataclass(frozen=True, slots=True)
class Size(Recipe):
    """A size, and how it is trained unless told otherwise."""

    side: int  # side of a volume in cells
    layers: int  # convolutions, each followed by a pooling that halves the side
    width: int  # channels of the first; the n-th has n times as many
    dense: tuple[int, int]  # features of the two dense layers before the last
    dropout: float  # share of those features that is dropped in training


# "full" is the network of MLPerf HPC (five convolutions of 32, 64, ... 160 channels on 128^3 cells); "demo" is for two
# CPU cores and some minutes; "tiny" is for tests.
SIZES: Mapping[str, Size] = {
    "full": Size(128, 5, 32, (128, 64), 0.5, batch_size=64, steps=10_000, lr=1e-3),
    "demo": Size(32, 4, 8, (64, 32), 0.0, batch_size=16, steps=400, lr=2e-3),
    "tiny": Size(8, 2, 2, (8, 4), 0.0, batch_size=8, steps=100, lr=5e-3),
}


@dataclass(frozen=True, kw_only=True)
class CosmoFlowSettings(SizedSettings):
    """`SizedSettings` of CosmoFlow; nothing else can be told."""

    samples: ClassVar[str] = "volumes"
    unit: ClassVar[str] = "volumes"
    recipes = SIZES
    samples_per_epoch = VOLUMES_PER_EPOCH
