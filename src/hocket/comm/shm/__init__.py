"""Collectives inside a host: one channel of shared memory, and CUDA IPC for ranks that share a GPU."""

from ._announcement import DTYPE_NUMBERS, DTYPES, NO_OPERATOR, NO_ROOT, describe
from ._channel import Channel
from ._liveness import LONGER, Liveness, state_of
from ._memory import empty, empty_like, is_registered, zeros
from ._segment import PAGE, Address, SharedSegment, host_identity
from ._shm import SharedMemoryTransport
from ._window import MemoryWindow, open_window

__all__ = [
    "DTYPES", "DTYPE_NUMBERS", "LONGER", "NO_OPERATOR", "NO_ROOT", "PAGE", "Address", "Channel", "Liveness",
    "MemoryWindow", "SharedMemoryTransport", "SharedSegment", "describe", "empty", "empty_like", "host_identity",
    "is_registered", "open_window", "state_of", "zeros",
]  # fmt: skip
