"""The board of workers on one host: counters and a ring of updates of each worker, in memory that all have mapped."""

import time

import torch

from hocket.comm import MemoryWindow

from ._board import WorkerState

_PUBLISHED, _RESTS, _BASE, _STATUS, _SEEN = range(5)
_SPINS = 50
_SHORT_S, _LONG_S = 5e-5, 1e-3


def window_nbytes(size: int, slots: int, nbytes: int) -> int:
    """Return bytes of a worker's part for updates of `nbytes`."""
    return _head_nbytes(size) + slots * _slot_nbytes(size, nbytes)


class SharedBoard:
    """See UpdateBoard.

    A worker writes its update, then counts it; who reads the count finds the update whole. It writes to a slot again
    only after all have counted the update there as seen, which `Pace` has waited for. `window` has `window_nbytes` of
    each worker, who may be `slots` updates ahead of what another has seen.
    """

    def __init__(self, window: MemoryWindow, slots: int, nbytes: int) -> None:
        self.rank = window.rank
        self.size = window.size
        self._window = window
        self._words = [window.words(rank, _SEEN + self.size) for rank in range(self.size)]
        self._slots: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for rank in range(self.size):
            memory = window.tensor(rank)
            rings = []
            for slot in range(slots):
                begin = _head_nbytes(self.size) + slot * _slot_nbytes(self.size, nbytes)
                body = begin + _seen_nbytes(self.size)
                rings.append((memory[begin : begin + 8 * self.size].view(torch.int64), memory[body : body + nbytes]))
            self._slots.append(rings)

    def slot(self) -> torch.Tensor:
        """See UpdateBoard."""
        mine = self._slots[self.rank]
        return mine[self._words[self.rank][_PUBLISHED] % len(mine)][1]

    def publish(self, state: WorkerState) -> None:
        """See UpdateBoard."""
        mine = self._slots[self.rank]
        mine[(state.published - 1) % len(mine)][0].copy_(torch.tensor(state.seen))
        self._window.fence()
        self._words[self.rank][_PUBLISHED] = state.published

    def tell(self, state: WorkerState) -> None:
        """See UpdateBoard."""
        words = self._words[self.rank]
        self._window.fence()  # what was seen has been read before its place may be written to again
        for peer, count in enumerate(state.seen):
            words[_SEEN + peer] = count
        words[_BASE] = state.base
        words[_RESTS] = state.rests
        words[_STATUS] = state.status
        self._window.fence()

    def state(self, peer: int) -> WorkerState:
        """See UpdateBoard."""
        words = self._words[peer]
        seen = tuple(words[_SEEN:])
        rests, base, status = words[_RESTS], words[_BASE], words[_STATUS]
        self._window.fence()
        return WorkerState(words[_PUBLISHED], rests, base, status, seen)

    def next(self, peer: int, taken: int) -> tuple[tuple[int, ...], torch.Tensor] | None:
        """See UpdateBoard."""
        if self._words[peer][_PUBLISHED] <= taken:
            return None
        self._window.fence()
        seen, data = self._slots[peer][taken % len(self._slots[peer])]
        return tuple(seen.tolist()), data

    def dead(self) -> set[int]:
        """See UpdateBoard."""
        return self._window.dead()

    def wait(self, tries: int) -> None:
        """See UpdateBoard."""
        time.sleep(0 if tries < _SPINS else _SHORT_S if tries < 4 * _SPINS else _LONG_S)

    def close(self, status: int) -> None:
        """See UpdateBoard."""
        self._words[self.rank][_STATUS] = status
        self._window.fence()
        self._window.close()


def _head_nbytes(size: int) -> int:
    return _aligned(8 * (_SEEN + size))


def _seen_nbytes(size: int) -> int:
    return _aligned(8 * size)


def _slot_nbytes(size: int, nbytes: int) -> int:
    return _seen_nbytes(size) + _aligned(nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
