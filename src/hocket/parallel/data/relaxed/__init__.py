"""Relaxed synchronisation: workers that do not wait for each other at every step. Not serially equivalent.

Read `_local.py`, `_pace.py` (the rules of bounded staleness) and `_stale.py`, then `_hogwild.py`.
"""

from ._hogwild import Hogwild as Hogwild
from ._local import LocalSGD as LocalSGD
from ._progress import Progress as Progress
from ._stale import BoundedStaleness as BoundedStaleness

__all__ = ["BoundedStaleness", "Hogwild", "LocalSGD", "Progress"]
