"""A run's timeline: what the recorder heard during some steps, as the type that the simulator makes too."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.timeline import Span, Timeline

from ._intervals import Interval, difference
from ._recent import Recent
from ._recorder import Recorder


def timeline_of(
    recorder: Recorder | Recent, steps: Sequence[Interval], *, rank: int = 0, name: str = "run"
) -> Timeline:
    """The operations of this process in some steps, and its computation: all time in which its thread did not wait.

    Args:
        recorder: that listened during the steps.
        steps: when each began and ended, in perf_counter seconds, in order.
        rank: of this process.
        name: of the timeline.

    Returns:
        Spans of kind "compute" on the stream "compute", and of kind "collective" on one stream for each group; zero is
        when the first step began. Where a rank waits for another's message, as in a pipeline, there is neither.
    """
    if not steps:
        return Timeline(name)
    zero, end = steps[0][0], steps[-1][1]
    spans = [
        Span(
            rank,
            f"group {op.group}",
            f"{op.label or op.kind} ({op.path})",
            op.started_s - zero,
            op.finished_s - zero,
            "collective",
            float(op.nbytes),
        )
        for op in recorder.operations()
        if op.started_s >= zero and op.finished_s <= end and op.path != "message"
    ]
    waits = [(begin, until) for begin, until in recorder.waits() if begin >= zero and until <= end]
    for begin, until in steps:
        spans += [
            Span(rank, "compute", "step", a - zero, b - zero, "compute") for a, b in difference((begin, until), waits)
        ]
    return Timeline(name, tuple(spans))
