"""The registration cache: mappings of peers' registered buffers, kept for the next operation on the same memory."""

import threading
from collections import OrderedDict

import torch

from ._memory import MemoryHandle
from ._segment import Address, SharedSegment

_CAPACITY = 4096
"""How many arenas are kept mapped."""


class RegistrationCache:
    """Mappings of peers' arenas, least recently used out first.

    An arena never moves or changes, so an entry never goes stale while its owner lives; the key holds the owner's
    nonce, so that a reused process number is not mistaken for it.
    """

    def __init__(self) -> None:
        self._arenas: OrderedDict[tuple[int, int], SharedSegment] = OrderedDict()
        self._lock = threading.Lock()

    def lookup(self, pid: int, nonce: int, place: MemoryHandle) -> torch.Tensor:
        """Return the peer's arena as a uint8 tensor. Raises OSError: the peer is gone or cannot be looked at."""
        key = (nonce, place.arena)
        with self._lock:
            segment = self._arenas.get(key)
            if segment is not None:
                self._arenas.move_to_end(key)
                return segment.tensor
            with torch.inference_mode(False):
                segment = SharedSegment.attach(Address(pid, place.fd, place.arena_nbytes))
            self._arenas[key] = segment
            if len(self._arenas) > _CAPACITY:
                self._arenas.popitem(last=False)
            return segment.tensor


registration_cache = RegistrationCache()
