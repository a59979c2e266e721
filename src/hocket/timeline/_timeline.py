"""`Timeline`: what happened when, on every rank and stream; the same from a simulation and from a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took a while.

    Attributes:
        rank: Where; a timeline's `names` may say what a number means.
        stream: What it ran on, as "compute" or "network"; spans of one stream may overlap.
        name: What it is called.
        start_s: When it began, seconds from the timeline's zero.
        end_s: When it ended.
        kind: What it is, for tables: "compute", "collective", "transfer", ...
        nbytes: What it moved, if it moved something.
    """

    rank: int
    stream: str
    name: str
    start_s: float
    end_s: float
    kind: str = ""
    nbytes: float | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Arrow:
    """That something on one rank led to something on another."""

    name: str
    source: int
    source_stream: str
    start_s: float
    destination: int
    destination_stream: str
    end_s: float


@dataclass(frozen=True, slots=True)
class Counter:
    """A value over time: it is `values[i]` from `times_s[i]` on."""

    name: str
    times_s: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Timeline:
    """Spans, arrows between them, and counters.

    Attributes:
        name: What was simulated or run.
        spans: Spans in any order.
        arrows: Arrows in any order.
        counters: Counters in any order.
        names: Names of ranks that are called otherwise than "rank 3".
    """

    name: str
    spans: tuple[Span, ...] = ()
    arrows: tuple[Arrow, ...] = ()
    counters: tuple[Counter, ...] = ()
    names: Mapping[int, str] = field(default_factory=dict)

    @property
    def start_s(self) -> float:
        """When the first span began; 0 without any."""
        return min((span.start_s for span in self.spans), default=0.0)

    @property
    def end_s(self) -> float:
        """When the last span ended; 0 without any."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return self.end_s - self.start_s

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have spans, in order."""
        return tuple(sorted({span.rank for span in self.spans}))

    def of(self, rank: int, kind: str | None = None) -> tuple[Span, ...]:
        """Return the spans of one rank, of one kind if given, by start."""
        return tuple(span for span in self._by_rank.get(rank, ()) if kind is None or span.kind == kind)

    @cached_property
    def _by_rank(self) -> dict[int, list[Span]]:
        found: dict[int, list[Span]] = {}
        for span in sorted(self.spans, key=lambda one: (one.start_s, one.end_s, one.stream, one.name)):
            found.setdefault(span.rank, []).append(span)
        return found

    def busy_s(self, rank: int, kind: str | None = None) -> float:
        """Return how long a rank had at least one span, of one kind if given: what overlaps counts once."""
        return covered_s((span.start_s, span.end_s) for span in self.of(rank, kind))

    def exposed_s(self, rank: int, kind: str = "collective", *, under: str = "compute") -> float:
        """Return how long a rank had spans of one kind and none of the other: communication that nothing hides."""
        both = [(span.start_s, span.end_s) for span in (*self.of(rank, kind), *self.of(rank, under))]
        return covered_s(both) - self.busy_s(rank, under)


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reach:
            total += end - max(start, reach)
            reach = end
    return total
