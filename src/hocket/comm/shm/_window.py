"""Memory of every rank that all ranks of the host may read and write at any time: one-sided, without any rule of order.

What `Mailbox` is for messages, this is for values that everyone may look at: parameters that are updated without locks,
counters, rings of updates. Who needs order makes it with counters and `fence`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from . import kernel as _kernel
from ._deaths import Deaths
from ._segment import PAGE, Address, Segment, host_identity, nonce


class Window:
    """One stretch of shared memory of each rank, mapped by all.

    The memory is anonymous: nothing is left in /dev/shm, whatever way a rank ends.

    Args:
        rank: this rank.
        segments: by rank.
        pids: process numbers, by rank.
    """

    def __init__(self, rank: int, segments: list[Segment], pids: list[int]) -> None:
        self.rank = rank
        self.size = len(segments)
        self._segments = segments
        self._deaths = Deaths()
        for peer, pid in enumerate(pids):
            if peer != rank:
                self._deaths.watch(peer, pid)

    def tensor(self, rank: int) -> torch.Tensor:
        """The bytes of a rank's part, as a uint8 tensor; zeros at first."""
        return self._segments[rank].tensor[PAGE:]

    def words(self, rank: int, count: int) -> memoryview:
        """The first `count` words of 64 bits of a rank's part; a word is read or written at once, never half of it."""
        return self._segments[rank].view[PAGE : PAGE + 8 * count].cast("q")

    def fence(self) -> None:
        """Orders the reads and writes before it against those after it, as other ranks see them."""
        _kernel.full_fence()

    def dead(self) -> set[int]:
        """The ranks whose processes have ended."""
        return self._deaths.ranks()

    def close(self) -> None:
        """Lets go of the other ranks; the memory goes with the last tensor that lies in it."""
        self._deaths.close()
        self._segments = []


def open_window(rank: int, nbytes: int, exchange: Callable[[Any], list[Any]]) -> Window | None:
    """Makes memory of `nbytes` on each rank and maps that of all; a collective operation.

    Args:
        rank: this rank.
        nbytes: of this rank's part; ranks may ask for different sizes.
        exchange: gives every rank's picklable value to every rank, by rank.

    Returns:
        The window; None on all ranks if they do not share a host, or HOCKET_SHARED_MEMORY is 0.
    """
    mine, segment = None, None
    if os.environ.get("HOCKET_SHARED_MEMORY", "1") != "0" and _kernel.supported():
        number = nonce()
        segment = Segment.create(f"window-{rank}", PAGE + nbytes)
        segment.view[:8] = number.to_bytes(8, "little")
        mine = (host_identity(), segment.address(), number)
    infos = exchange(mine)
    window = None
    if segment is not None and mine is not None and all(info is not None and info[0] == mine[0] for info in infos):
        try:
            segments = [segment if peer == rank else _attach(info[1], info[2]) for peer, info in enumerate(infos)]
            window = Window(rank, segments, [info[1].pid for info in infos])
        except (OSError, ValueError):
            window = None  # a peer's memory cannot be seen from here; nobody uses it then
    everyone = all(exchange(window is not None))
    if segment is not None:
        segment.close()  # mapped by all who could
    if not everyone and window is not None:
        window.close()
    return window if everyone else None


def _attach(address: Address, number: int) -> Segment:
    segment = Segment.attach(address)
    if int.from_bytes(segment.view[:8], "little") != number:
        raise ValueError("the process number belongs to another process")
    return segment
