"""Processor time as an idle core would have taken it: a limit on it holds on a slow or shared core too."""

from __future__ import annotations

import time

TYPE_CHECKING = False  # `typing` would be loaded before an import that is timed
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    Found = TypeVar("Found")

_LOOPS = 1_000_000
_LOOPS_S = 0.06  # of `_loops_s` on one idle core of an AMD EPYC of 2021 with Python 3.11


def timed(work: Callable[[], Found]) -> tuple[Found, float]:
    """Do the work, and return what it gives and the seconds of this process's time that it took.

    Where the core is slower than the one of `_LOOPS_S`, as neighbours on the same silicon make it, the seconds are
    fewer by as much: by the slower of what a short loop takes before the work and after it.
    """
    before_s = _loops_s()
    begin_s = time.process_time()
    found = work()
    took_s = time.process_time() - begin_s
    return found, took_s / max(1.0, before_s / _LOOPS_S, _loops_s() / _LOOPS_S)


def _loops_s() -> float:
    begin_s = time.process_time()
    total = 0
    for number in range(_LOOPS):
        total += number * number
    return time.process_time() - begin_s
