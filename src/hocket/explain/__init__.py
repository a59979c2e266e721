"""Reads what a run left, and says where its time and memory went, who was late, and why; as sentences and one page.

Names are loaded when they are first asked for: every `hocket run` ends with `explain`.
"""

from typing import TYPE_CHECKING

from hocket._lazy import lazy

if TYPE_CHECKING:
    from ._explain import Explanation, explain
    from ._export import prometheus_text, write_scalars
    from ._parts import Arrivals, Parts, parts_of
    from ._predicted import PredictedStep, WhatIf, predicted_of
    from ._replay import Replay, Replayed, ReplayedOperation
    from ._report import report
    from ._timeline import timeline_of_run
    from ._top import top_lines
    from ._verdict import Verdict
    from ._verdicts import verdicts_of

__all__ = [
    "Arrivals", "Explanation", "Parts", "PredictedStep", "Replay", "Replayed", "ReplayedOperation", "Verdict", "WhatIf",
    "explain", "parts_of", "predicted_of", "prometheus_text", "report", "timeline_of_run", "top_lines", "verdicts_of",
    "write_scalars",
]  # fmt: skip

__getattr__ = lazy(
    __name__,
    {
        "_explain": "Explanation explain",
        "_export": "prometheus_text write_scalars",
        "_parts": "Arrivals Parts parts_of",
        "_predicted": "PredictedStep WhatIf predicted_of",
        "_replay": "Replay Replayed ReplayedOperation",
        "_report": "report",
        "_timeline": "timeline_of_run",
        "_top": "top_lines",
        "_verdict": "Verdict",
        "_verdicts": "verdicts_of",
    },
)
