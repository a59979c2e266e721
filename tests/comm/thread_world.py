"""Ranks as threads of one process, each with its own Channel over real segments."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from hocket.comm.shm._channel import SEGMENT_NBYTES, Channel
from hocket.comm.shm._peers import Peer
from hocket.comm.shm._segment import SharedSegment
from hocket.comm.shm._shm import SharedMemoryTransport
from hocket.comm.shm.bootstrap import process_nonce
from hocket.testing import deadline

TIMEOUT_S = 20.0


class ThreadWorld:
    """n transports that share memory within this process."""

    def __init__(self, n: int) -> None:
        self.n = n
        segments = [SharedSegment.create(f"test-{r}", SEGMENT_NBYTES) for r in range(n)]
        peers = [Peer(r, os.getpid(), process_nonce(), segment, -1) for r, segment in enumerate(segments)]
        self.channels = [Channel("threads", r, peers, range(n)) for r in range(n)]
        self.transports = [SharedMemoryTransport(channel) for channel in self.channels]
        for segment in segments:
            segment.close()

    def run(self, body: Callable[[int, SharedMemoryTransport], Any]) -> list[Any]:
        """Runs `body(rank, transport)` on all ranks; results by rank, exceptions as results."""
        results: list[Any] = [None] * self.n

        def rank_main(rank: int) -> None:
            try:
                results[rank] = body(rank, self.transports[rank])
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=rank_main, args=(r,), daemon=True) for r in range(self.n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(deadline(2 * TIMEOUT_S))
            assert not thread.is_alive(), "a rank hangs"
        return results

    def values(self, body: Callable[[int, SharedMemoryTransport], Any]) -> list[Any]:
        """Like `run`, but an exception of any rank fails the test."""
        results = self.run(body)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results
