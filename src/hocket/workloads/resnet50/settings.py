"""What a run of ResNet-50 can be told."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hocket.workloads._settings import SettingsError, WorkloadSettings, check_batch_norm

IMAGES_PER_EPOCH = 1_281_167  # as in ImageNet

# Channels of the first stage: ResNet-50 itself, and one as deep and narrow, for tests.
WIDTHS: Mapping[str, int] = {"full": 64, "tiny": 4}


@dataclass(frozen=True, kw_only=True)
class ResNet50Settings(WorkloadSettings):
    """`WorkloadSettings`, and what ResNet-50 can be told beside."""

    samples_per_epoch = IMAGES_PER_EPOCH

    size: str  # one of `WIDTHS`
    image_size: int  # side of the images in pixels
    synthetic: bool = False  # train on made-up images, to measure throughput; the only data there is so far

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size not in WIDTHS:
            raise SettingsError(f"--size {self.size}: not one of {', '.join(WIDTHS)}")
        if not self.synthetic:
            raise SettingsError("resnet50 comes without photographs; give --synthetic to measure it on made-up images")
        if self.image_size < 32:
            raise SettingsError(
                f"--image-size {self.image_size}: ResNet-50 halves its image five times; use 32 or more"
            )
        check_batch_norm(self, self.image_size)

    @classmethod
    def defaults(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return learning rate 0.1 per 256 images (Goyal et al. 2017, arXiv:1706.02677), and steps for a throughput."""
        batch_size = options.get("batch_size", 16)
        size = options.get("size", "full")
        return {
            "size": size,
            "image_size": 64 if size == "tiny" else 224,
            "steps": 20,
            "batch_size": batch_size,
            "lr": 0.1 * max(1, batch_size) / 256,
        }
