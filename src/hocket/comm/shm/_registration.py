"""The registration cache: mappings of peers' registered buffers, kept for the next operation on the same memory."""

import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch

from ._memory import MemoryHandle
from ._segment import Address, SharedSegment


@dataclass(frozen=True, slots=True)
class RegistrationStats:
    """How often a peer's buffer was already mapped when an operation needed it.

    Attributes:
        hits: Uses of a mapping that was there.
        misses: Uses that had to map the peer's memory first.
        mapped_nbytes: Size of all mappings now.
    """

    hits: int
    misses: int
    mapped_nbytes: int

    @property
    def hit_rate(self) -> float:
        """Hits over all uses; 1.0 where nothing was used."""
        uses = self.hits + self.misses
        return self.hits / uses if uses else 1.0


class RegistrationCache:
    """Mappings of peers' arenas, least recently used out first.

    Args:
        capacity: How many arenas are kept mapped. An arena never moves or changes, so an entry never goes stale while
            its owner lives; the key holds the owner's nonce, so that a reused process number is not mistaken for it.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._arenas: OrderedDict[tuple[int, int], SharedSegment] = OrderedDict()
        self._lock = threading.Lock()
        self._hits = 0
        self._misses = 0

    def lookup(self, pid: int, nonce: int, place: MemoryHandle) -> torch.Tensor:
        """Return the peer's arena as a uint8 tensor. Raises OSError: the peer is gone or cannot be looked at."""
        key = (nonce, place.arena)
        with self._lock:
            segment = self._arenas.get(key)
            if segment is not None:
                self._hits += 1
                self._arenas.move_to_end(key)
                return segment.tensor
            self._misses += 1
            with torch.inference_mode(False):
                segment = SharedSegment.attach(Address(pid, place.fd, place.arena_nbytes))
            self._arenas[key] = segment
            if len(self._arenas) > self._capacity:
                self._arenas.popitem(last=False)
            return segment.tensor

    def count_hits(self, n: int) -> None:
        """Count `n` uses that a cached plan has already resolved."""
        self._hits += n

    def stats(self) -> RegistrationStats:
        """Return hits, misses and mapped bytes so far."""
        with self._lock:
            return RegistrationStats(self._hits, self._misses, sum(s.nbytes for s in self._arenas.values()))


registration_cache = RegistrationCache()


def registration_stats() -> RegistrationStats:
    """Return how this process's registration cache has fared."""
    return registration_cache.stats()
