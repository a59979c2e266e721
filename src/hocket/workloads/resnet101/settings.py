"""What a run of ResNet-101 can be told."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hocket.workloads._settings import Recipe, SettingsError, SizedSettings, check_batch_norm

IMAGES_PER_EPOCH = 8192
SMALLEST_IMAGE = 32


@dataclass(frozen=True, slots=True)
class Size(Recipe):
    """A size, and how it is trained unless told otherwise."""

    depths: tuple[int, int, int, int]  # bottlenecks in each of the four stages
    width: int  # channels of the 3x3 convolutions in the first stage
    image_size: int  # side of the images in pixels


# "full" is ResNet-101 (He et al. 2015, table 1); "demo" is as deep and a quarter as wide, so that two CPU cores see it
# learn within three minutes; "tiny" is for tests.
SIZES: Mapping[str, Size] = {
    "full": Size((3, 4, 23, 3), width=64, image_size=224, batch_size=32, steps=10_000, lr=0.0125),
    "demo": Size((3, 4, 23, 3), width=16, image_size=48, batch_size=32, steps=500, lr=0.05),
    "tiny": Size((1, 1, 2, 1), width=4, image_size=32, batch_size=8, steps=100, lr=0.05),
}


@dataclass(frozen=True, kw_only=True)
class ResNet101Settings(SizedSettings):
    """`SizedSettings`, and what ResNet-101 can be told beside."""

    recipes = SIZES
    samples_per_epoch = IMAGES_PER_EPOCH

    image_size: int  # side of the images in pixels

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size < SMALLEST_IMAGE:
            raise SettingsError(
                f"--image-size {self.image_size}: the digits need {SMALLEST_IMAGE} pixels or more; enlarge it"
            )
        check_batch_norm(self, self.image_size)

    @classmethod
    def defaults(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the size's own values."""
        found = super().defaults(options)
        return {**found, "image_size": SIZES[found["size"]].image_size}
