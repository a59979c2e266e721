"""What an operator launches on a GPU, and in which number format products run there."""

from dataclasses import dataclass

import torch

from ._share import FORMATS


@dataclass(frozen=True)
class Float32Formats:
    """In which formats products of float32 run on a GPU, by torch's settings: "float32", as IEEE has it, or "tf32"."""

    products: str
    convolutions: str
    recurrent: str

    @classmethod
    def now(cls) -> "Float32Formats":
        """Read the settings: by default convolutions and recurrent layers run in TF32, matrix products do not."""
        found = []
        for place, old in (
            (torch.backends.cuda.matmul, None), (torch.backends.cudnn, "conv"), (torch.backends.cudnn, "rnn"),
        ):  # fmt: skip
            newer = getattr(place, old, None) if old else place
            said = getattr(newer, "fp32_precision", None)
            found.append("tf32" if (said == "tf32" if said else place.allow_tf32) else "float32")
        return cls(*found)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What an operator launches, as an `Operation` has it."""

    name: str  # what such kernels are called together
    kind: str = ""  # of `Operation.kind`
    number_format: str = ""  # of products, and of what is done for their sake; "" of others
    flops: float = 0.0  # floating-point operations
    performed: float = 0.0  # those that are computed, where that is known to differ; 0 elsewhere
    moved: float = 0.0  # bytes that are read and written
    fixed: float = 0.0  # of these, weights
    calls: int = 1  # how many
    inner_calls: int = 0  # of `Operation.inner_calls`


def format_of(dtype: torch.dtype) -> str:
    """Return the name of `hocket.workload.FORMATS`; "" of integers and complex numbers."""
    name = str(dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name if name in FORMATS else ""


def often(flops: float, moved: float) -> int:
    """Return about how often a product uses each byte, a power of 2.

    Products that differ in it are not counted together: one that arithmetic limits hides no other's traffic.
    """
    return 1 << max(0, int(flops / moved).bit_length() - 1) if moved else 1
