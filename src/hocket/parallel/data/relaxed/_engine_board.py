"""The board of workers on several hosts: states and updates as messages of Gloo, two threads for each other worker."""

import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...mesh import World
from ._board import LEFT, RUNNING, WorkerState

_STATE, _UPDATE, _END = range(3)
_HEAD = 5  # kind, published, rests, base, status; then what was seen
_MOST_BEAT_S = 1.0
_MOST_GOODBYE_S = 1.0
_TICK_S = 0.05


class EngineBoard:
    """See UpdateBoard.

    A message is a head of integers, and for an update its bytes. A worker that has nothing to say says so every second,
    or every tenth of `timeout_s`, so that silence means that it or the way to it is gone. The rules of `Pace` bound how
    many updates are on the way, so nothing here waits for space.

    Args:
        world: The workers; making this is a collective operation.
        nbytes: Bytes of an update.
        timeout_s: Seconds of silence after which a worker counts as dead, and the longest wait for threads to end.
    """

    def __init__(self, world: World, nbytes: int, timeout_s: float) -> None:
        self.rank, self.size = world.rank, world.size
        self._nbytes = nbytes
        self._timeout_s = timeout_s
        self._beat_s = min(_MOST_BEAT_S, timeout_s / 10)
        ranks = dist.get_process_group_ranks(world.group)
        # A group of its own: its silence and its end must not be those of the user's group.
        self._group: Any = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout_s))
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # for who waits for others
        self._outbox = threading.Condition(lock)  # for the threads that send
        start = WorkerState(0, 0, 0, RUNNING, (0,) * self.size)
        self._mine = start
        self._states = [start] * self.size
        self._arrived: list[deque[tuple[tuple[int, ...], torch.Tensor]]] = [deque() for _ in range(self.size)]
        self._lost: set[int] = set()
        self._outgoing: list[deque[tuple[WorkerState, torch.Tensor]]] = [deque() for _ in range(self.size)]
        self._news: list[bool] = [False] * self.size
        self._closing = False
        self._slot = torch.empty(nbytes, dtype=torch.uint8)
        self._threads: list[threading.Thread] = []
        for peer in range(self.size):
            if peer != self.rank:
                for work in (self._send_all, self._receive_all):
                    thread = threading.Thread(target=work, args=(peer,), name=f"hocket-relaxed-{peer}", daemon=True)
                    thread.start()
                    self._threads.append(thread)

    # --- what UpdateBoard asks --------------------------------------------------------------------------------------

    def slot(self) -> torch.Tensor:
        """See UpdateBoard."""
        return self._slot

    def publish(self, state: WorkerState) -> None:
        """See UpdateBoard."""
        data, self._slot = self._slot, torch.empty(self._nbytes, dtype=torch.uint8)
        with self._changed:
            self._mine = state
            for peer in range(self.size):
                if peer != self.rank:
                    self._outgoing[peer].append((state, data))
                    self._news[peer] = False
            self._outbox.notify_all()

    def tell(self, state: WorkerState) -> None:
        """See UpdateBoard."""
        with self._changed:
            self._mine = state
            self._news = [True] * self.size
            self._outbox.notify_all()

    def state(self, peer: int) -> WorkerState:
        """See UpdateBoard."""
        with self._changed:
            return self._states[peer]

    def next(self, peer: int, taken: int) -> tuple[tuple[int, ...], torch.Tensor] | None:
        """See UpdateBoard; a message is taken when the next is asked for, in order, so `taken` needs no look."""
        with self._changed:
            return self._arrived[peer].popleft() if self._arrived[peer] else None

    def dead(self) -> set[int]:
        """See UpdateBoard."""
        with self._changed:
            return set(self._lost)

    def wait(self, tries: int) -> None:
        """See UpdateBoard."""
        with self._changed:
            self._changed.wait(_TICK_S if tries else 0.0)

    def close(self, status: int) -> None:
        """See UpdateBoard."""
        with self._changed:
            mine = self._mine
            self._mine = WorkerState(mine.published, mine.rests, mine.base, status, mine.seen)
            self._closing = True
            self._outbox.notify_all()
        # Who has failed stays only to say so: the others may be anywhere, and the threads end with the process.
        deadline_s = time.monotonic() + (self._timeout_s if status == LEFT else min(_MOST_GOODBYE_S, self._timeout_s))
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if status == LEFT:
            dist.destroy_process_group(self._group)

    # --- threads ------------------------------------------------------------------------------------------------------

    def _send_all(self, peer: int) -> None:
        try:
            while True:
                with self._changed:
                    self._outbox.wait_for(
                        lambda: self._outgoing[peer] or self._news[peer] or self._closing, self._beat_s
                    )
                    if self._outgoing[peer]:
                        kind = _UPDATE
                        state, data = self._outgoing[peer].popleft()
                    else:
                        kind, state, data = (_END if self._closing else _STATE), self._mine, self._slot
                        self._news[peer] = False
                head = torch.tensor([kind, state.published, state.rests, state.base, state.status, *state.seen])
                self._wait_for(self._group.send([head], peer, 0))
                if kind == _UPDATE:
                    self._wait_for(self._group.send([data], peer, 0))
                if kind == _END:
                    return
        except RuntimeError:
            self._lose(peer)

    def _receive_all(self, peer: int) -> None:
        head = torch.empty(_HEAD + self.size, dtype=torch.int64)
        try:
            while True:
                self._wait_for(self._group.recv([head], peer, 0))
                kind, published, rests, base, status, *seen = head.tolist()
                state = WorkerState(published, rests, base, status, tuple(seen))
                data = None
                if kind == _UPDATE:
                    data = torch.empty(self._nbytes, dtype=torch.uint8)
                    self._wait_for(self._group.recv([data], peer, 0))
                with self._changed:
                    if data is not None:
                        self._arrived[peer].append((state.seen, data))
                    self._states[peer] = state
                    self._changed.notify_all()
                if kind == _END:
                    return
        except RuntimeError:
            self._lose(peer)

    def _wait_for(self, work: Any) -> None:
        work.wait(timedelta(seconds=self._timeout_s))

    def _lose(self, peer: int) -> None:
        with self._changed:
            self._lost.add(peer)
            self._changed.notify_all()
