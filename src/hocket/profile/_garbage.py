"""When garbage was collected, noted by functions in C alone.

Python calls what hears of collections in the thread that collects. A function in Python would run the handlers of
signals that came meanwhile, and Python drops what they raise there: Ctrl-C, or a handler that ends the program on
SIGTERM, would do nothing. Functions in C run no handlers.
"""

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any


class GarbageClock:
    """Hears of every collection from now on, until `close`."""

    def __init__(self) -> None:
        clock, self._heard = itertools.tee(iter(time.perf_counter, None))
        # Called with a moment, "start" or "stop", and facts about it: the clock is looked at once for each of the two.
        self._callback: Callable[..., Any] = partial(max, key=partial(next, clock))
        enabled = gc.isenabled()
        gc.disable()
        self._seen = _collections()
        gc.callbacks.append(self._callback)
        if enabled:
            gc.enable()

    def collected(self) -> Iterator[tuple[float, float]]:
        """Yield begin and end of the collections that ended since the last call, as `time.perf_counter` has them."""
        ended = _collections()
        while self._seen < ended:
            self._seen += 1
            begin_s, _, _, end_s = itertools.islice(self._heard, 4)
            yield begin_s, end_s

    def close(self) -> None:
        """Hear no more."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._callback)


def _collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())
