"""Collectives inside a host: one channel of shared memory, and CUDA IPC for ranks that share a GPU."""

from ._channel import Channel as Channel
from ._liveness import Liveness as Liveness
from ._memory import empty as empty
from ._memory import empty_like as empty_like
from ._memory import is_registered as is_registered
from ._memory import zeros as zeros
from ._registration import RegistrationStats as RegistrationStats
from ._registration import registration_stats as registration_stats
from ._segment import PAGE as PAGE
from ._segment import Address as Address
from ._segment import SharedSegment as SharedSegment
from ._segment import host_identity as host_identity
from ._shm import SharedMemoryTransport as SharedMemoryTransport
from ._window import MemoryWindow as MemoryWindow
from ._window import open_window as open_window

__all__ = [
    "Address",
    "Channel",
    "Liveness",
    "PAGE",
    "RegistrationStats",
    "SharedSegment",
    "SharedMemoryTransport",
    "MemoryWindow",
    "empty",
    "empty_like",
    "host_identity",
    "is_registered",
    "open_window",
    "registration_stats",
    "zeros",
]
