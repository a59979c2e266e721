"""Compares the losses of one rank with those of several: does the number of workers change what is learnt?"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_HINTS = {
    "Dropout": "dropout draws other masks on every rank; set its probability to 0 for this check",
    "BatchNorm": "batch norm normalises over each rank's part of the batch, not over the whole",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found.

    Attributes:
        one: the losses of one rank, backward pass by backward pass.
        several: the global losses of n ranks.
        worst: largest relative difference.
        first_divergent: number (from 1) of the first backward pass beyond the tolerance, or None.
        tolerance: the largest relative difference that counts as rounding.
        hints: what may explain a divergence.
    """

    one: list[float]
    several: list[float]
    worst: float
    first_divergent: int | None
    tolerance: float
    hints: list[str]

    @property
    def equivalent(self) -> bool:
        """Whether both runs made the same losses, as many of them."""
        return self.first_divergent is None

    def to_json(self) -> dict[str, Any]:
        """The fields and the verdict as JSON values."""
        return {"equivalent": self.equivalent, **asdict(self)}


def read_runs(result_path: Path, n: int) -> list[dict[str, Any]]:
    """What `check_runner` wrote on each of `n` ranks."""
    return [json.loads(Path(f"{result_path}.{rank}").read_text()) for rank in range(n)]


def global_losses(runs: Sequence[dict[str, Any]]) -> list[float]:
    """The losses over the global batch: means weighted by the ranks' samples, or sums where the script takes sums."""
    losses = []
    for of_ranks in zip(*(run["losses"] for run in runs), strict=False):
        if runs[0]["sums"]:
            losses.append(math.fsum(value for value, weight in of_ranks if weight))
        else:
            losses.append(math.fsum(value * weight for value, weight in of_ranks if weight) / len(runs))
    return losses


def compare(one: Sequence[dict[str, Any]], several: Sequence[dict[str, Any]], tolerance: float) -> Comparison:
    """Compares a run of one rank with a run of several, both as `read_runs` returns them."""
    a, b = global_losses(one), global_losses(several)
    differences = [_relative(x, y) for x, y in zip(a, b, strict=False)]
    first = next((i for i, d in enumerate(differences, start=1) if not d <= tolerance), None)
    if first is None and len(a) != len(b):
        first = min(len(a), len(b)) + 1
    hints = []
    if not several[0]["distributed"]:
        hints.append("the script never calls hocket.distribute, so every rank trains a model of its own")
    for name, hint in _HINTS.items():
        if any(name in module for module in several[0]["modules"]):
            hints.append(hint)
    if not hints:
        hints.append("look for randomness without a seed, or for a learning rate that depends on the number of ranks")
    worst = max(differences, default=0.0)
    return Comparison(a, b, worst, first, tolerance, [] if first is None else hints)


def _relative(a: float, b: float) -> float:
    if a == b:
        return 0.0
    return abs(a - b) / max(abs(a), abs(b))
