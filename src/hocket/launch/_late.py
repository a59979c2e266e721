"""Ranks for which others wait to begin: who has not come where all ranks meet, and what it does meanwhile.

A rank that has come waits for minutes, since another may import or load longer. Only a launcher sees both.
"""

import math
import os
import time
from collections.abc import Sequence
from typing import Final

from hocket._sweep import stat_of
from hocket.comm import rendezvous

from ._child import Child

_LOOK_S: Final = 1.0
_LATE_S: Final = 15.0  # that ranks have waited when those that are late are first named
_LATER: Final = 4.0  # times as long, and they are named once more
_NAMED: Final = 8


class LateRanks:
    """Looks who is late, for as long as some ranks have come and others have not.

    Args:
        place: Where all ranks meet.
        world: How many they are.
        secret: The job's, if they meet in a store.
    """

    def __init__(self, place: str, world: int, secret: bytes | None = None) -> None:
        self._place, self._world, self._secret = place, world, secret
        self._look_s = 0.0  # when to look again
        self._since_s: float | None = None  # when it was first seen that some wait
        self._due_s = _LATE_S  # how long they have waited when late ranks are named again

    def look(self, children: Sequence[Child]) -> str:
        """Return what is to be said of late ranks now; "" for nothing.

        Args:
            children: Ranks of this host.
        """
        now_s = time.monotonic()
        if now_s < self._look_s:
            return ""
        self._look_s = now_s + _LOOK_S
        came = rendezvous.came(self._place, self._world, self._secret)
        late = sorted(set(range(self._world)) - came)
        if not late:
            self._look_s = math.inf
        if not came or not late:
            return ""
        if self._since_s is None:
            self._since_s = now_s
        waited_s = now_s - self._since_s
        if waited_s < self._due_s:
            return ""
        self._due_s = _LATER * waited_s
        what = "; ".join(filter(None, (_does(child) for child in children if child.rank in late[:_NAMED])))
        return (
            f"{_ranks(sorted(came))} ha{'ve' if len(came) > 1 else 's'} waited {waited_s:.0f} s for {_ranks(late)} to "
            "come to hocket.distribute, hocket.Trainer or init_process_group" + (f" ({what})" if what else "")
        )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > _NAMED:
        return f"{len(ranks)} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _does(child: Child) -> str:
    """Return what a rank's process does, or has done so far."""
    fields = stat_of(child.pid)
    if not fields or fields[0] in ("Z", "X"):
        return ""
    if fields[0] == "T":
        return f"rank {child.rank}, process {child.pid}, is stopped"
    busy_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return f"rank {child.rank}, process {child.pid}, has computed for {busy_s:.0f} s so far"
