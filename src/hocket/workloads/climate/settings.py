"""What a run of the climate segmentation can be told."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hocket.workloads._settings import Recipe, SizedSettings

MAPS_PER_EPOCH = 2048


@dataclass(frozen=True, slots=True)
class Size(Recipe):
    """A size, and how it is trained unless told otherwise."""

    height: int  # height of a map in pixels, from south to north
    breadth: int  # breadth of a map in pixels, around the earth
    width: int  # channels of the network's first level; each further one has twice as many
    levels: int  # how often the maps are halved


# "full" has the maps of Kurth et al. 2018 (768 x 1152 pixels); "demo" is for two CPU cores and some minutes; "tiny" is
# for tests.
SIZES: Mapping[str, Size] = {
    "full": Size(768, 1152, 64, 4, batch_size=16, steps=5_000, lr=1e-3),
    "demo": Size(64, 96, 8, 3, batch_size=8, steps=250, lr=4e-3),
    "tiny": Size(16, 24, 2, 2, batch_size=8, steps=100, lr=5e-3),
}


@dataclass(frozen=True, kw_only=True)
class ClimateSettings(SizedSettings):
    """`SizedSettings` of the climate segmentation; nothing else can be told."""

    samples: ClassVar[str] = "maps"
    unit: ClassVar[str] = "maps"
    recipes = SIZES
    samples_per_epoch = MAPS_PER_EPOCH
