"""Learning rates over the steps of a run."""

from __future__ import annotations

import math

_LAST = 0.01  # of the highest learning rate, at the last step


def warm_up_and_cosine(step: int, *, steps: int, warm_up_steps: int) -> float:
    """Which part of the highest learning rate step ``step`` has: a linear rise, times half a cosine down to 0.01.

    Args:
        step: From 0.
        steps: Of the whole run.
        warm_up_steps: Of the rise.
    """
    rise = min(1.0, (step + 1) / warm_up_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / steps)))
    return rise * (_LAST + (1.0 - _LAST) * cosine)
