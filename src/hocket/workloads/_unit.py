"""What a run's throughput counts: images, sentences, or the tokens in its samples."""

from dataclasses import dataclass
from typing import Any, Self

from hocket.workloads._settings import WorkloadSettings


@dataclass(frozen=True, slots=True)
class ThroughputUnit:
    """A countable part of the data.

    Attributes:
        samples: What the samples are called, in the plural.
        name: What is counted, in the plural; the samples themselves where there is one in each.
        per_sample: How many one sample has.
    """

    samples: str
    name: str
    per_sample: int

    @classmethod
    def of(cls, settings: WorkloadSettings) -> Self:
        """Return the unit of a workload."""
        return cls(settings.samples, settings.unit, settings.units_per_sample)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Return the unit that a run's config names."""
        return cls(**config["unit"])
