"""What a worker has done without waiting for the others, and what they have done together."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...mesh import World


@dataclass(slots=True)
class Progress:
    """Counts of one worker, or of all together."""

    rule: str  # the rule as a plan writes it, such as "stale:4"
    updates: int = 0  # updates that this worker's gradients have made
    # updates of others that were added to this worker's parameters; 0 where they share memory or average
    applied: int = 0
    averages: int = 0  # how often parameters were averaged
    samples: float = 0.0  # samples that this worker's updates were made of
    # seconds spent waiting for others: at the bound, or for averages. The end of an epoch is not counted.
    waited_s: float = 0.0
    rested_s: float = 0.0  # seconds spent at the end of epochs, until the slowest had come
    # how many updates had missed how many others; see the rules for what is counted
    staleness: Counter[int] = field(default_factory=Counter)
    # the counts of each worker at the last time that all met; empty in those
    workers: list[dict[str, Any]] = field(default_factory=list)

    def alone(self) -> dict[str, Any]:
        """Return this worker's counts as JSON values."""
        return {
            "updates": self.updates,
            "applied": self.applied,
            "averages": self.averages,
            "samples": self.samples,
            "waited_s": self.waited_s,
            "rested_s": self.rested_s,
            "staleness": histogram_json(self.staleness),
        }

    def meet(self, world: World) -> None:
        """Learn what all workers have counted; a collective operation."""
        self.workers = world.from_all(self.alone())

    def to_json(self) -> dict[str, Any]:
        """Return this worker's counts, each worker's when all last met, and the staleness of all updates together."""
        return {
            "rule": self.rule,
            **self.alone(),
            "workers": self.workers,
            "staleness_of_all": histogram_json(added([worker["staleness"] for worker in self.workers])),
        }


def histogram_json(counts: Counter[int]) -> dict[str, int]:
    """Return counts by number, as JSON has them, in order."""
    return {str(number): counts[number] for number in sorted(counts)}


def added(histograms: Sequence[dict[str, int]]) -> Counter[int]:
    """Add up several histograms of `histogram_json`."""
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update({int(number): count for number, count in histogram.items()})
    return total
