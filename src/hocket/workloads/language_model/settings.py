"""What a run of the language model can be told."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hocket.workloads._settings import Recipe, SizedSettings

EXCERPTS_PER_EPOCH = 4096


@dataclass(frozen=True, slots=True)
class Size:
    """How deep and how wide a GPT is."""

    layers: int  # blocks
    heads: int  # attention heads in each
    width: int  # channels
    context: int  # bytes that are looked at together


# "full" has the shape of GPT-2's smallest model, with bytes for tokens; "demo" learns within two minutes on two CPU
# cores; "tiny" is for tests.
SIZES: Mapping[str, Size] = {
    "full": Size(layers=12, heads=12, width=768, context=1024),
    "demo": Size(layers=4, heads=4, width=128, context=96),
    "tiny": Size(layers=2, heads=4, width=16, context=12),
}
RECIPES: Mapping[str, Recipe] = {
    "full": Recipe(batch_size=64, steps=20_000, lr=6e-4),
    "demo": Recipe(batch_size=32, steps=500, lr=3e-3),
    "tiny": Recipe(batch_size=8, steps=100, lr=3e-3),
}


@dataclass(frozen=True, kw_only=True)
class LanguageModelSettings(SizedSettings):
    """`SizedSettings` of the language model; nothing else can be told."""

    samples: ClassVar[str] = "excerpts"
    unit: ClassVar[str] = "bytes"
    recipes = RECIPES
    samples_per_epoch = EXCERPTS_PER_EPOCH

    @property
    def units_per_sample(self) -> int:
        """Bytes that are predicted in an excerpt."""
        return SIZES[self.size].context
