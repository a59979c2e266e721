"""The trust ratios of a step: by how much each parameter's update was scaled."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TrustRatios:
    """By what LARS or LAMB multiplied the update of each parameter in the last step.

    Attributes:
        values: for each parameter that is adapted, by name: of the whole parameter, wherever its parts are. Without a
            Trainer the names are those that the optimizer was given with the parameters, or their numbers.
    """

    values: dict[str, float]

    @property
    def least(self) -> float:
        """The smallest."""
        return min(self.values.values())

    @property
    def median(self) -> float:
        """The one in the middle."""
        return statistics.median(self.values.values())

    @property
    def most(self) -> float:
        """The largest."""
        return max(self.values.values())

    def to_json(self) -> dict[str, Any]:
        """The summary and each parameter's as JSON values."""
        return {"least": self.least, "median": self.median, "most": self.most, "parameters": dict(self.values)}

    def __str__(self) -> str:
        return f"{self.least:.3g} to {self.most:.3g}, median {self.median:.3g}, of {len(self.values)} parameters"
