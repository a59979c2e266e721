"""Memory of every rank that all ranks of the host may read and write at any time: one-sided, without any rule of order.

What `ShmStreams` is for messages, this is for values that everyone may look at: parameters that are updated without
locks, counters, rings of updates. Who needs order makes it with counters and `fence`.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from . import kernel as _kernel
from ._liveness import Liveness
from ._segment import PAGE, SharedSegment, host_identity, nonce


class MemoryWindow:
    """One stretch of shared memory of each rank, mapped by all.

    The memory is anonymous: nothing is left in /dev/shm, whatever way a rank ends.

    Args:
        rank: Number of this rank.
        segments: Segments by rank.
        pids: Process numbers, by rank.
    """

    def __init__(self, rank: int, segments: list[SharedSegment], pids: list[int]) -> None:
        self.rank = rank
        self.size = len(segments)
        self._segments = segments
        self._liveness = Liveness()
        for peer, pid in enumerate(pids):
            if peer != rank:
                self._liveness.watch(peer, pid)

    def tensor(self, rank: int) -> torch.Tensor:
        """Return the bytes of a rank's part, as a uint8 tensor; zeros at first."""
        return self._segments[rank].tensor[PAGE:]

    def words(self, rank: int, count: int) -> memoryview:
        """Return the first `count` 64-bit words of a rank's part; a word is read or written at once, never half."""
        return self._segments[rank].view[PAGE : PAGE + 8 * count].cast("q")

    def fence(self) -> None:
        """Order the reads and writes before it against those after it, as other ranks see them."""
        _kernel.full_fence()

    def dead(self) -> set[int]:
        """Return the ranks whose processes have ended."""
        return self._liveness.ranks()

    def close(self) -> None:
        """Let go of the other ranks; the memory goes with the last tensor that lies in it."""
        self._liveness.close()
        self._segments = []


def open_window(rank: int, nbytes: int, exchange: Callable[[Any], list[Any]]) -> MemoryWindow | None:
    """Make memory of `nbytes` on each rank and map that of all; a collective operation.

    Args:
        rank: Number of this rank.
        nbytes: Bytes of this rank's part; ranks may ask for different sizes.
        exchange: Function that gives every rank's picklable value to every rank, by rank.

    Returns:
        The window; None on all ranks if they do not share a host, or HOCKET_SHARED_MEMORY is 0.
    """
    mine, segment = None, None
    if os.environ.get("HOCKET_SHARED_MEMORY", "1") != "0" and _kernel.supported():
        number = nonce()
        segment = SharedSegment.create(f"window-{rank}", PAGE + nbytes)
        segment.mark(number)
        mine = (host_identity(), segment.address(), number)
    infos = exchange(mine)
    window = None
    if segment is not None and mine is not None and all(info is not None and info[0] == mine[0] for info in infos):
        try:
            segments = [segment if peer == rank else SharedSegment.attach(*info[1:]) for peer, info in enumerate(infos)]
            window = MemoryWindow(rank, segments, [info[1].pid for info in infos])
        except (OSError, ValueError):
            window = None  # a peer's memory cannot be seen from here; nobody uses it then
    everyone = all(exchange(window is not None))
    if segment is not None:
        segment.close()  # mapped by all who could
    if not everyone and window is not None:
        window.close()
    return window if everyone else None
