"""What a training loop's callbacks say, written to the record of this rank."""

import contextlib
import math
import time
from typing import Any

from hocket.profile import mark_step, note_value, phase, tell_steps, watch


class LoopRecord:
    """Steps, phases and values of one loop. Whoever counts steps too (Trainer, another callback) is not doubled."""

    def __init__(self) -> None:
        self._phases: dict[str, contextlib.AbstractContextManager[None]] = {}
        self._begin_s = 0.0
        self._made = 0

    def begin(self) -> None:
        """Record this rank from now on, if it is not yet: training begins."""
        watch()
        self._made, self._begin_s = tell_steps(), time.perf_counter()

    def stepped(self) -> None:
        """Record a step, an update of the weights, that ends now; it began where the one before ended."""
        end_s = time.perf_counter()
        if tell_steps() == self._made:
            mark_step(self._begin_s, end_s)
        self._made, self._begin_s = tell_steps(), end_s

    def enter(self, name: str) -> None:
        """Begin a phase, unless it has begun."""
        if name not in self._phases:
            self._phases[name] = phase(name)
            self._phases[name].__enter__()

    def leave(self, name: str) -> None:
        if name in self._phases:
            self._phases.pop(name).__exit__(None, None, None)

    def values(self, found: dict[str, Any], step: int) -> None:
        """Record the numbers of a dictionary; what is none is left out."""
        for name, value in found.items():
            with contextlib.suppress(TypeError, ValueError):
                number = math.nan if value is None else float(value)
                if value is not None:
                    note_value(name, number, step)
