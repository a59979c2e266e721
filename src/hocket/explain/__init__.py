"""Reads what a run left, and says where its time and memory went, who was late, and why; as sentences and one page."""

from ._explain import Explanation, explain
from ._parts import Parts, arrivals, parts_of
from ._report import report
from ._timeline import timeline_of_run
from ._verdicts import Verdict, verdicts_of
from ._what_if import replay_s

__all__ = [
    "Explanation", "Parts", "Verdict", "arrivals", "explain", "parts_of", "replay_s", "report", "timeline_of_run",
    "verdicts_of",
]  # fmt: skip
