"""Relaxed synchronisation: workers that do not wait for each other at every step. Not serially equivalent.

Read `_local.py`, `_pace.py` (the rules of bounded staleness) and `_stale.py`, then `_hogwild.py`.
"""

from ._hogwild import Hogwild
from ._local import LocalSGD
from ._progress import Progress
from ._stale import BoundedStaleness

__all__ = ["BoundedStaleness", "Hogwild", "LocalSGD", "Progress"]
