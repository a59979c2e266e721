"""Buffers for segments, kept for the next segment: fresh memory costs more than the sum that is made in it."""

from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]

_LEAST_NBYTES: Final = 1 << 10
_KEPT_NBYTES: Final = 1 << 26


class Pool:
    """Lends flat uint8 arrays."""

    def __init__(self) -> None:
        self._free: dict[int, list[Array]] = {}
        self._kept_nbytes = 0

    def take(self, nbytes: int) -> Array:
        """Return an array of `nbytes` bytes; what is in it is left from before."""
        size = max(_LEAST_NBYTES, 1 << (nbytes - 1).bit_length())
        free = self._free.get(size)
        if free:
            self._kept_nbytes -= size
            return free.pop()[:nbytes]
        return np.empty(size, dtype=np.uint8)[:nbytes]

    def give(self, array: Array) -> None:
        """Take back what `take` lent."""
        whole = array.base
        assert whole is not None
        size = whole.nbytes
        if self._kept_nbytes + size <= _KEPT_NBYTES:
            self._kept_nbytes += size
            self._free.setdefault(size, []).append(whole)
