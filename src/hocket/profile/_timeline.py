"""A run's timeline: what the recorder heard during some steps, as the type that the simulator makes too."""

from collections import deque
from collections.abc import Iterable, Sequence

from hocket.comm import OperationRecord
from hocket.timeline import Span, Timeline

from ._listener import Interval, OperationListener
from ._recorder import Recorder


class Recent(OperationListener):
    """Keeps the last operations, and when the user's thread waited; an operation costs two appends.

    Args:
        keep: How many of each kind are kept.
    """

    def __init__(self, keep: int) -> None:
        super().__init__()
        self._operations: deque[OperationRecord] = deque(maxlen=keep)
        self._waits: deque[Interval] = deque(maxlen=keep)

    def operation_finished(self, op: OperationRecord) -> None:
        self._operations.append(op)
        if op.inline:
            self._waits.append((op.posted_s, op.finished_s))

    def operation_waited(self, op: OperationRecord, begin_s: float, end_s: float) -> None:
        self._waits.append((begin_s, end_s))

    def operations(self) -> list[OperationRecord]:
        """Return the last operations, in the order in which they finished."""
        return list(self._operations)

    def waits(self) -> list[Interval]:
        """Return when the user's thread was blocked on an operation, of late: begin and end in perf_counter seconds."""
        return list(self._waits)


def timeline_of(
    recorder: Recorder | Recent, steps: Sequence[Interval], *, rank: int = 0, name: str = "run"
) -> Timeline:
    """Return this process's operations and computation in some steps; what does not wait is computation.

    Args:
        recorder: Recorder that listened during the steps.
        steps: Begin and end of each step, in perf_counter seconds, in order.
        rank: Rank of this process.
        name: Name of the timeline.

    Returns:
        Spans of kind "compute" on the stream "compute", and of kind "collective" on one stream for each group; zero is
        when the first step began, and each step begins where the one before it ended: what happens between steps
        (evaluation, checkpoints, the next batch) is left out. Where a rank waits for another's message, as in a
        pipeline, there is neither.
    """
    spans: list[Span] = []
    operations, waits, gone = recorder.operations(), recorder.waits(), 0.0
    for begin, until in steps:
        zero = begin - gone
        spans += [
            Span(
                rank,
                f"group {op.group}",
                f"{op.label or op.kind} ({op.path})",
                op.started_s - zero,
                min(op.finished_s, until) - zero,
                "collective",
                float(op.nbytes),
            )
            for op in operations
            if begin <= op.started_s < until and op.path != "message"
        ]
        mine = [(a, min(b, until)) for a, b in waits if begin <= a < until]
        spans += [
            Span(rank, "compute", "step", a - zero, b - zero, "compute") for a, b in difference((begin, until), mine)
        ]
        gone += until - begin
    return Timeline(name, tuple(spans))


def difference(whole: Interval, holes: Iterable[Interval]) -> list[Interval]:
    """Return what is left of one interval outside of some others."""
    left, at = [], whole[0]
    for begin, end in sorted(holes):
        if end <= max(at, begin):
            continue
        if begin >= whole[1]:
            break
        if begin > at:
            left.append((at, begin))
        at = end
    return [*left, (at, whole[1])] if at < whole[1] else left
