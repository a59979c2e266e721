"""The photographs that scikit-image and scikit-learn carry in their wheels: nothing is downloaded.

This module does not import torch, so that the command line can check a run before it starts anything.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from hocket._extras import require

Pixels = npt.NDArray[np.uint8]
"""RGB, (height, width, 3)."""

# Whole photographs are held out: no pixel of these is ever trained on. They are the ones stored without loss, so that
# what is measured is super-resolution and not the blocks of a JPEG encoder.
HELD_OUT = ("astronaut.png", "chelsea.png", "coffee.png")
TRAINING = (
    "china.jpg", "flower.jpg", "hubble_deep_field.jpg", "ihc.png", "motorcycle_left.png", "motorcycle_right.png",
    "retina.jpg", "rocket.jpg",
)  # fmt: skip
_SCIKIT_LEARN = frozenset({"china.jpg", "flower.jpg"})


def path_of(name: str) -> Path:
    """Return where an installed photograph lies.

    Raises:
        MissingExtraError: The package that carries it is not installed.
        FileNotFoundError: The installed package does not carry it.
    """
    package, folder, project = (
        ("sklearn", "datasets/images", "scikit-learn") if name in _SCIKIT_LEARN else ("skimage", "data", "scikit-image")
    )
    require(f"the photograph {name}", package)
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / folder / name
    if not path.is_file():
        raise FileNotFoundError(f"photograph {name}: not in the installed {project} ({path})")
    return path


def size_of(name: str) -> tuple[int, int]:
    """Return the width and height in pixels, read from the file's header."""
    with Image.open(path_of(name)) as image:
        return image.size


def smallest_side(names: tuple[str, ...]) -> tuple[int, str]:
    """Return the shortest side among photographs, in pixels, and whose it is."""
    return min((min(size_of(name)), name) for name in names)


def resize_bicubic(pixels: Pixels, width: int, height: int) -> Pixels:
    """Resample bicubically; when it shrinks, the kernel is widened by the scale, which keeps frequencies from folding.

    The one kernel of this package: low-resolution images for training and for testing and the bicubic reference.
    """
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))


@dataclass(frozen=True, slots=True)
class Photograph:
    """A photograph and its low-resolution version."""

    name: str
    high: Pixels
    low: Pixels
    scale: int

    @classmethod
    def load(cls, name: str, scale: int) -> "Photograph":
        """Read an installed photograph, cropped to a multiple of ``scale``, and shrink it by ``scale``."""
        with Image.open(path_of(name)) as image:
            high = np.asarray(image.convert("RGB"))
        height, width = (side - side % scale for side in high.shape[:2])
        high = np.ascontiguousarray(high[:height, :width])
        return cls(Path(name).stem, high, resize_bicubic(high, width // scale, height // scale), scale)

    def bicubic(self) -> Pixels:
        """Return the low-resolution version magnified back without learning: what a network has to beat."""
        height, width = self.high.shape[:2]
        return resize_bicubic(self.low, width, height)
