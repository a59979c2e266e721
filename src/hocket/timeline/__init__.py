"""Timelines: spans, arrows and counters per rank and stream, from a simulation or a run; Perfetto JSON; comparison."""

from ._compare import Comparison as Comparison
from ._compare import ComparisonRow as ComparisonRow
from ._compare import compare as compare
from ._perfetto import to_perfetto as to_perfetto
from ._perfetto import write_perfetto as write_perfetto
from ._read import TimelineError as TimelineError
from ._read import from_perfetto as from_perfetto
from ._read import read_perfetto as read_perfetto
from ._timeline import Arrow as Arrow
from ._timeline import Counter as Counter
from ._timeline import Span as Span
from ._timeline import Timeline as Timeline

__all__ = [
    "Arrow",
    "Comparison",
    "Counter",
    "ComparisonRow",
    "Span",
    "Timeline",
    "TimelineError",
    "compare",
    "from_perfetto",
    "read_perfetto",
    "to_perfetto",
    "write_perfetto",
]
