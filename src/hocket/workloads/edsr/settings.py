"""What a run of EDSR can be told."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hocket.workloads._settings import Recipe, SettingsError, SizedSettings

SCALES = (2, 3, 4)
PATCHES_PER_EPOCH = 1600


@dataclass(frozen=True, slots=True)
class Size:
    """How deep and how wide an EDSR is."""

    blocks: int  # residual blocks
    features: int  # channels inside
    residual_scale: float  # factor on each residual branch


@dataclass(frozen=True, slots=True)
class PatchRecipe(Recipe):
    """How a size is trained unless told otherwise."""

    patch: int  # side of a training patch in low-resolution pixels


# The paper's two models (its table 1); "baseline" is trained without residual scaling. The third is ours: small enough
# to pass bicubic well within two minutes on two CPU cores. The last one is for tests.
SIZES: Mapping[str, Size] = {
    "full": Size(blocks=32, features=256, residual_scale=0.1),
    "baseline": Size(blocks=16, features=64, residual_scale=1.0),
    "demo": Size(blocks=4, features=32, residual_scale=1.0),
    "tiny": Size(blocks=2, features=8, residual_scale=1.0),
}
# The paper's patch and learning rate for its models; it makes 300,000 steps on a thousand photographs.
RECIPES: Mapping[str, PatchRecipe] = {
    "full": PatchRecipe(patch=48, batch_size=16, steps=20_000, lr=1e-4),
    "baseline": PatchRecipe(patch=48, batch_size=16, steps=20_000, lr=1e-4),
    "demo": PatchRecipe(patch=16, batch_size=16, steps=2_400, lr=2e-3),
    "tiny": PatchRecipe(patch=6, batch_size=16, steps=100, lr=5e-4),
}


@dataclass(frozen=True, kw_only=True)
class EdsrSettings(SizedSettings):
    """`SizedSettings`, and what EDSR can be told beside."""

    recipes = RECIPES
    samples_per_epoch = PATCHES_PER_EPOCH

    scale: int  # magnification: 2, 3 or 4
    patch: int  # side of a training patch in pixels of the original

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale not in SCALES:
            raise SettingsError(f"--scale {self.scale}: EDSR magnifies by {', '.join(map(str, SCALES))}")
        if self.patch < self.scale or self.patch % self.scale:
            nearest = max(1, round(self.patch / self.scale)) * self.scale
            raise SettingsError(
                f"--patch {self.patch} is not a multiple of --scale {self.scale}; use for instance --patch {nearest}"
            )
        from hocket.workloads.edsr import photographs  # needs Pillow, which the model and its sizes do not

        side, name = photographs.smallest_side(photographs.TRAINING)
        side -= side % self.scale
        if self.patch > side:
            raise SettingsError(
                f"--patch {self.patch} is larger than a photograph: {name} leaves at most --patch {side}"
            )

    @classmethod
    def defaults(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the size's own values; 16 patches in a batch, as the paper."""
        found, scale = super().defaults(options), options.get("scale", 2)
        return {**found, "scale": scale, "patch": RECIPES[found["size"]].patch * scale}
