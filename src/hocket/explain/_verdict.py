"""One finding about a run, and from where on something is one."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

LEAST_STEPS = 6
BUSY = 0.15  # of the time in which ranks are ready and have no core
LEAST_GAIN = 0.05  # below this share of the time a finding is not worth a sentence
SHOWN = 0.0005  # of a step: what would be 0.0% has no line
MOST_LISTED = 8  # stages, ranks or hosts


def listed(things: Iterable[object]) -> str:
    """Return the first of some things, one after the other, and dots where there are more."""
    texts = list(map(str, things))
    return ", ".join([*texts[:MOST_LISTED], *["..."] * (len(texts) > MOST_LISTED)])


def ms(seconds: float) -> str:
    """Return a time in milliseconds with three digits, a long one written out, not as a power of ten."""
    rounded = float(f"{seconds * 1e3:.3g}")
    return f"{rounded:.0f}" if rounded >= 1000 else f"{rounded:g}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding.

    Attributes:
        kind: "straggler", "slow loader", "slow link", "loading data", "communication", "unbalanced stages", "bubbles",
            "small batches", "uneven work", "slow steps", "pauses", "busy machine", "memory growth", "checkpoints",
            "garbage collection", "not a number", "died", "failed" or "ended" (from outside).
        sentence: The finding in one sentence.
        evidence: The figures behind it.
        next_step: What to do.
        confidence: "high", "medium" or "low".
        ranks: The ranks that it is about; none if about all.
        gain: Share of the steps' time that would be saved without it, 0 to 1.
        since_step: Step with which it began, where it has not always been so.
    """

    kind: str
    sentence: str
    evidence: str
    next_step: str
    confidence: str
    ranks: tuple[int, ...] = ()
    gain: float = 0.0
    since_step: int | None = None

    def __str__(self) -> str:
        return f"{self.sentence}\n  evidence ({self.confidence} confidence): {self.evidence}\n  next: {self.next_step}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)
