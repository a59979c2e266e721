"""When each step of a run began and ended, and what was communicated meanwhile: against what its plan predicted."""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import Any, ClassVar

from hocket.planner import Plan, check_run
from hocket.profile import Recent, mark_step, timeline_of
from hocket.timeline import Timeline

from ..mesh import World

_KEPT = 50
_OPERATIONS_KEPT = 10_000
_WARM_UP = 2


class StepLog:
    """Listens to this process's operations from its first step on, until another log begins one.

    Operations between steps are those of whoever stepped last; logs at rest cost nothing. Not a synchronisation
    anywhere.
    """

    _listening: ClassVar[weakref.ref[StepLog] | None] = None

    def __init__(self) -> None:
        self._recent = Recent(_OPERATIONS_KEPT)
        weakref.finalize(self, self._recent.stop)
        self._seen = 0
        self._steps: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def begin(self) -> float:
        """Note that a step begins; return when, in seconds of perf_counter."""
        other = None if StepLog._listening is None else StepLog._listening()
        if other is not self:
            if other is not None:
                other._recent.stop()
            self._recent.start()
            StepLog._listening = weakref.ref(self)
        return time.perf_counter()

    def add(self, begin_s: float, end_s: float) -> None:
        """Note that a step was made; times are of perf_counter."""
        mark_step(begin_s, end_s)
        self._seen += 1
        if self._seen > _WARM_UP:  # the first ones set up kernels, buffers and the optimizer's state
            self._steps.append((begin_s, end_s))

    def timeline(self, world: World) -> Timeline:
        """Return the timeline of all ranks, each with its first step at zero; a collective operation."""
        parts = world.from_all(self._own(world.rank))
        return Timeline("run", tuple(span for part in parts for span in part.spans))

    def checked(self, plan: Plan, rank: int) -> dict[str, Any]:
        """Return as "prediction" this rank's part of a step beside the plan's, where there is something to compare."""
        if "step_s" not in plan.predicted or not self._steps:
            return {}
        found = check_run(plan, self._own(rank), steps=len(self._steps))
        parts = [{"part": name, "predicted_s": a, "measured_s": b} for name, a, b in found.rows]
        return {"prediction": {"error": found.error, "parts": parts, "communication_s": dict(found.collectives)}}

    def _own(self, rank: int) -> Timeline:
        return timeline_of(self._recent, list(self._steps), rank=rank)
