"""How slow the machine is just now, and deadlines that stretch with it."""

import contextlib
import os
import time
from pathlib import Path

VARIABLE = "HOCKET_TEST_PATIENCE"
_GOOD_FOR_S = 5.0
_FALLS_TO = 0.8  # of what it was, each time: what was begun under load is judged a little later
_MOST = 32.0  # a hang is still to end on the same day
_LOOPS = 400_000
_LOOPS_S = 0.015  # of `_spin` on one idle core of an AMD EPYC of 2021 with Python 3.11

_measured: tuple[float, float] | None = None  # the factor, and when (monotonic seconds)


def patience() -> float:
    """Return how many times as long as on an idle machine things take now: at least 1, at most 32.

    It is the largest of what a short loop took over what it takes on an idle core, the processes that want to run over
    the cores, and the load average of the last minute over the cores. Measured at most every 5 seconds. The environment
    variable HOCKET_TEST_PATIENCE sets it by hand; `run_ranks` sets it for its ranks.
    """
    global _measured
    if by_hand := os.environ.get(VARIABLE):
        return max(1.0, float(by_hand))
    if _measured is None or time.monotonic() > _measured[1] + _GOOD_FOR_S:
        cores = os.cpu_count() or 1
        factor = max(1.0, _spin() / _LOOPS_S, *(count / cores for count in _wanting()))
        before = _measured[0] if _measured else 1.0
        _measured = min(max(factor, _FALLS_TO * before), _MOST), time.monotonic()
    return _measured[0]


def deadline(seconds: float) -> float:
    """Return how long to wait now for what takes at most `seconds` on an idle machine: `seconds` times `patience()`."""
    return seconds * patience()


def _spin() -> float:
    """Return the seconds of wall time that a fixed piece of work takes."""
    begin_s = time.perf_counter()
    total = 0
    for number in range(_LOOPS):
        total += number
    return time.perf_counter() - begin_s


def _wanting() -> list[float]:
    """Return how many processes and threads ran or wanted to: on average of the last minute, and now without it."""
    with contextlib.suppress(OSError, ValueError, IndexError):  # Linux alone has the file
        words = Path("/proc/loadavg").read_text().split()
        return [float(words[0]), float(words[3].partition("/")[0]) - 1]
    return []
