"""Reads what a run left, and says where its time and memory went, who was late, and why; as sentences and one page."""

from ._explain import Explanation, explain
from ._export import prometheus_text, write_scalars
from ._parts import Arrivals, Parts, parts_of
from ._predicted import PredictedStep, WhatIf, predicted_of
from ._replay import Replay, Replayed, ReplayedOperation
from ._report import report
from ._timeline import timeline_of_run
from ._top import top_lines
from ._verdicts import Verdict, verdicts_of

__all__ = [
    "Arrivals", "Explanation", "Parts", "PredictedStep", "Replay", "Replayed", "ReplayedOperation", "Verdict", "WhatIf",
    "explain", "parts_of", "predicted_of", "prometheus_text", "report", "timeline_of_run", "top_lines", "verdicts_of",
    "write_scalars",
]  # fmt: skip
