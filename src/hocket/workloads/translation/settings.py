"""What a run of the translation can be told."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hocket.workloads._settings import Recipe, SettingsError, SizedSettings

LANGUAGES = ("french", "german")
PAIRS_PER_EPOCH = 8192


@dataclass(frozen=True, slots=True)
class Size:
    """How deep and how wide a Transformer is."""

    layers: int  # layers of the encoder, and of the decoder
    heads: int  # attention heads in each
    width: int  # channels


# "full" is the paper's base model (its table 3); "demo" learns within two minutes on two CPU cores; "tiny" is for
# tests.
SIZES: Mapping[str, Size] = {
    "full": Size(layers=6, heads=8, width=512),
    "demo": Size(layers=2, heads=4, width=64),
    "tiny": Size(layers=2, heads=4, width=16),
}
RECIPES: Mapping[str, Recipe] = {
    "full": Recipe(batch_size=256, steps=5_000, lr=5e-4),
    "demo": Recipe(batch_size=64, steps=500, lr=3e-3),
    "tiny": Recipe(batch_size=8, steps=100, lr=3e-3),
}


@dataclass(frozen=True, kw_only=True)
class TranslationSettings(SizedSettings):
    """`SizedSettings`, and what the translation can be told beside."""

    samples: ClassVar[str] = "pairs"
    unit: ClassVar[str] = "pairs"
    recipes = RECIPES
    samples_per_epoch = PAIRS_PER_EPOCH

    language: str  # one of `LANGUAGES`: into which English is translated

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.language not in LANGUAGES:
            raise SettingsError(f"--language {self.language}: not one of {', '.join(LANGUAGES)}")

    @classmethod
    def defaults(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the size's own values; into French."""
        return {**super().defaults(options), "language": "french"}
