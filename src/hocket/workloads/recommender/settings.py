"""What a run of the recommender can be told."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hocket.workloads._settings import Recipe, SettingsError, SizedSettings
from hocket.workloads.recommender import FETCH, HELD_OUT, RATINGS


@dataclass(frozen=True, slots=True)
class Size(Recipe):
    """A size, and how it is trained unless told otherwise."""

    width: int  # numbers in a row of each table
    hidden: int  # width of the layers between


# "demo" is trained within two minutes on two CPU cores; "full" has tables as wide as DLRM's for Criteo's data; "tiny"
# is for tests.
SIZES: Mapping[str, Size] = {
    "full": Size(width=64, hidden=512, batch_size=1024, steps=700, lr=5e-4),
    "demo": Size(width=16, hidden=64, batch_size=256, steps=1400, lr=2e-3),
    "tiny": Size(width=4, hidden=8, batch_size=8, steps=100, lr=2e-3),
}


@dataclass(frozen=True, kw_only=True)
class RecommenderSettings(SizedSettings):
    """`SizedSettings`, and what the recommender can be told beside."""

    samples: ClassVar[str] = "ratings"
    unit: ClassVar[str] = "ratings"
    recipes = SIZES
    samples_per_epoch = RATINGS - HELD_OUT

    data: str  # path of a recbole wheel, which has MovieLens-100K; empty for made-up ratings
    synthetic: bool  # train on made-up ratings

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.synthetic and self.data:
            raise SettingsError(f"--synthetic and --data {self.data} name two sets of ratings; give one")
        if not self.synthetic and not Path(self.data).is_file():
            raise SettingsError(f"--data {self.data}: there is no such file; fetch a wheel with {FETCH}")

    def check_data(self) -> None:
        """Read the wheel. Raises SettingsError: it is none of recbole, or has other ratings."""
        if self.synthetic:
            return
        from hocket.workloads.recommender.ratings import movielens  # lazy: numpy

        try:
            found = len(movielens(Path(self.data)))
        except ValueError as error:
            raise SettingsError(f"--data {error}") from None
        if found != RATINGS:
            raise SettingsError(
                f"--data {self.data}: it holds {found:,} ratings, and MovieLens-100K has {RATINGS:,}; fetch a whole "
                f"wheel with {FETCH}"
            )

    @classmethod
    def defaults(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the size's own values; the wheel in the cache directory if there is one, else made-up ratings."""
        data = options.get("data", "" if options.get("synthetic") else _cached_wheel())
        return {**super().defaults(options), "data": data, "synthetic": not data}


def _cached_wheel() -> str:
    """Return the newest recbole wheel in the user's cache directory; empty if there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "hocket"
    wheels = sorted(cache.glob("recbole-*.whl"), key=lambda wheel: wheel.stat().st_mtime)
    return str(wheels[-1]) if wheels else ""
