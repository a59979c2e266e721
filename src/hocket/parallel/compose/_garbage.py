"""Collections of garbage that look through what is new."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_inside = False  # a block of ours has set objects aside
_AT_START = 10_000  # more than the interpreter itself sets aside (375 in Python 3.12), and fewer than a library is
_by_others = False  # so had somebody else: to count them takes 40 ms of half a million, so it is found out once


@contextmanager
def old_objects_set_aside() -> Iterator[None]:
    """Keep what is there from being looked through by each collection: imported modules take 0.1 to 0.5 s each time.

    Nothing is done where somebody has set objects aside already, nor later in a process where somebody had.
    """
    global _inside, _by_others
    _by_others = _by_others or (not _inside and gc.get_freeze_count() > _AT_START)
    if _inside or _by_others:
        yield
        return
    _inside = True
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _inside = False
