"""Timelines: spans, arrows and counters per rank and stream, from a simulation or a run; Perfetto JSON; comparison."""

from ._compare import Comparison, ComparisonRow, compare
from ._perfetto import to_perfetto, write_perfetto
from ._read import TimelineError, from_perfetto, read_perfetto
from ._timeline import Arrow, Counter, Span, Timeline, covered_s

__all__ = [
    "Arrow", "Comparison", "ComparisonRow", "Counter", "Span", "Timeline", "TimelineError", "compare", "covered_s",
    "from_perfetto", "read_perfetto", "to_perfetto", "write_perfetto",
]  # fmt: skip
