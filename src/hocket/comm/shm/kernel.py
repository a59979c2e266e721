"""The few Linux calls that Python does not offer: futex on shared memory, a yield without the GIL, a memory fence.

Where the fence is: a rank writes its data, then its phase counter; a peer reads the counter, then the data. x86-64
keeps stores in order and loads in order (total store order), so there the plain accesses that CPython makes through a
memoryview are enough. aarch64 does not: `fence()` is called between data and counter on both sides and runs
`atomic_thread_fence(seq_cst)` from libatomic; where that library is missing it locks and unlocks two pthread mutexes,
whose release and following acquire (RCsc in the Arm architecture: STLR then LDAR stay in order) order everything
before against everything after. On any other processor shared memory is not used.
"""

import ctypes
import platform
import threading
from collections.abc import Callable

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYONE = 0x7FFFFFFF
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_MEMORY_ORDER_SEQ_CST = 5

_machine = platform.machine()
_libc = ctypes.CDLL(None, use_errno=False)


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
]

# ctypes releases the GIL around the call, which os.sched_yield of Python 3.11 does not.
yield_core: Callable[[], int] = _libc.sched_yield


def supported() -> bool:
    """Return whether this processor and system can run the shared-memory transport."""
    return platform.system() == "Linux" and _machine in _SYS_FUTEX


def futex_wait(address: int, seen: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at `address` equals `seen`, at most `timeout_s`; may wake for no reason."""
    spec = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    _syscall(_SYS_FUTEX[_machine], address, _FUTEX_WAIT, seen, ctypes.addressof(spec), None, 0)


def futex_wake(address: int) -> None:
    """Wake everyone who sleeps on the word at `address`, in any process."""
    _syscall(_SYS_FUTEX[_machine], address, _FUTEX_WAKE, _EVERYONE, None, None, 0)


def _make_fence() -> Callable[[], None] | None:
    if _machine == "x86_64":
        return None
    try:
        atomic_thread_fence = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError):
        return _two_mutexes()
    atomic_thread_fence.argtypes = [ctypes.c_int]
    return lambda: atomic_thread_fence(_MEMORY_ORDER_SEQ_CST)


def _two_mutexes() -> Callable[[], None]:
    mutexes = [ctypes.create_string_buffer(64) for _ in range(2)]  # PTHREAD_MUTEX_INITIALIZER is all zeros
    lock, unlock = _libc.pthread_mutex_lock, _libc.pthread_mutex_unlock

    def fence() -> None:
        for mutex in mutexes:
            lock(mutex)
            unlock(mutex)

    return fence


fence: Callable[[], None] | None = _make_fence() if supported() else None
"""Orders all memory accesses before it against all after it, but for a store and a later load on x86-64, which only
`full_fence` orders; None where the processor keeps the rest in order by itself."""

_private = threading.Lock()


def full_fence() -> None:
    """Order every access before it against every one after it, a store against a later load included.

    On x86-64 the locked instruction inside an uncontended lock does that.
    """
    if fence is not None:
        fence()
    else:
        _private.acquire()
        _private.release()
