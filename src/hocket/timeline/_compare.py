"""Two timelines side by side: predicted and measured, or before and after."""

import re
from collections import defaultdict
from dataclasses import dataclass

from ._timeline import Timeline, covered_s


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One kind of work in both timelines.

    Attributes:
        kind: Kind of spans; "whole" for the whole.
        name: Name of spans, empty for all of the kind.
        first_s: Mean over the first's ranks of the time that it took there.
        second_s: The same for the second.
    """

    kind: str
    name: str
    first_s: float
    second_s: float

    @property
    def ratio(self) -> float:
        """The second by the first; infinite if the first has none of it, 1 if neither has."""
        if self.first_s == 0:
            return 1.0 if self.second_s == 0 else float("inf")
        return self.second_s / self.first_s


@dataclass(frozen=True)
class Comparison:
    """What differs.

    Attributes:
        first: Name of the first timeline.
        second: Name of the second.
        rows: The whole first, then kinds, then names within each kind, those with the largest difference first.
    """

    first: str
    second: str
    rows: tuple[ComparisonRow, ...]

    @property
    def error(self) -> float:
        """How much longer the second is than the first, as a part of it: of a prediction, its error."""
        return self.rows[0].ratio - 1

    def __str__(self) -> str:
        lines = [f"{'':32} {self.first[:14]:>14} {self.second[:14]:>14} {'ratio':>8}"]
        for row in self.rows:
            label = f"  {row.name}" if row.name else row.kind
            lines.append(f"{label[:32]:32} {row.first_s:14.6f} {row.second_s:14.6f} {row.ratio:8.3f}")
        return "\n".join(lines)


def compare(first: Timeline, second: Timeline) -> Comparison:
    """Compare two timelines by kind and name of their spans.

    Times are unions per rank, so that what overlaps counts once, and means over ranks, so that timelines of different
    numbers of ranks compare.

    Args:
        first: The reference, as what was measured.
        second: The other, as what was predicted.
    """
    kinds = [_by_kind(timeline) for timeline in (first, second)]
    names = [_by_name(timeline) for timeline in (first, second)]
    rows = [ComparisonRow("whole", "", first.seconds, second.seconds)]
    for kind in sorted(set(kinds[0]) | set(kinds[1])):
        rows.append(ComparisonRow(kind, "", kinds[0].get(kind, 0.0), kinds[1].get(kind, 0.0)))
        inside = {name for one, name in (*names[0], *names[1]) if one == kind}
        each = [
            ComparisonRow(kind, name, names[0].get((kind, name), 0.0), names[1].get((kind, name), 0.0))
            for name in inside - {kind}  # steps, which are all of their kind
        ]
        rows += sorted(each, key=lambda row: (-abs(row.second_s - row.first_s), row.name))
    return Comparison(first.name, second.name, tuple(rows))


def _by_kind(timeline: Timeline) -> dict[str, float]:
    kinds = {span.kind for span in timeline.spans}
    ranks = timeline.ranks
    return {kind: sum(timeline.busy_s(rank, kind) for rank in ranks) / len(ranks) for kind in kinds}


def _by_name(timeline: Timeline) -> dict[tuple[str, str], float]:
    spans: defaultdict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
    for span in timeline.spans:
        # A run's steps and operations are numbered: all of a name are one row.
        spans[span.kind, re.sub(r"(?<=^step) \d+$| #\d+", "", span.name), span.rank].append((span.start_s, span.end_s))
    total: defaultdict[tuple[str, str], float] = defaultdict(float)
    for (kind, name, _), each in sorted(spans.items()):
        total[kind, name] += covered_s(each) / len(timeline.ranks)
    return dict(total)
