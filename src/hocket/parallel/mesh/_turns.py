"""Threads and collective operations: those of two threads would meet in another order on each rank."""

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

_POOLS = ("concurrent.futures.thread", "multiprocessing.pool")
_POOLED = (*_POOLS, "concurrent.futures._base", "queue", "threading")  # what runs in an idle thread of a pool
_WAITS = {("threading", name) for name in ("wait", "join", "_wait_for_tstate_lock")} | {("selectors", "select")}
_SOON_S, _LOOK_S = 0.5, 0.002

_lock = threading.Lock()
_last: threading.Thread = threading.main_thread()
_last_what = "nothing yet"
_overtaken = ""  # what the last thread is told at its next call: while it ran, another was refused
_waited_for = False  # whether the main thread waits for the task of a pool in which the last thread has called


def in_turn(what: str) -> None:
    """Refuse a collective operation if the thread that has called the last one may call again.

    A program may build in its main thread and train in another, and go on in the main thread when that has ended, or,
    if it is one of a pool, has ended a task that the main thread has waited for. Two threads that run at once take
    turns in another order on each rank: their operations would meet each other's, and give one's numbers to the other
    where sizes are alike. Both are refused, the other one at its next call: which of them came first is no matter of
    the program, and on another rank it is this one that goes on.

    Args:
        what: the thing that is called, for the message.

    Raises:
        RuntimeError: another thread that has called is still running; or another one was refused since this one called.
    """
    global _last, _last_what, _overtaken, _waited_for
    me, last = threading.current_thread(), _last
    if me is last:
        if _overtaken:
            text, _overtaken = _overtaken, ""
            raise RuntimeError(text)
        _last_what = what
        return
    if isinstance(me, threading._DummyThread):  # of no known end: made by C++ or by another language
        return
    with _lock:
        main = threading.main_thread()
        hands_over = last is main and not _within(last)
        if last.is_alive() and not hands_over and not (_waited_for and _soon(_is_idle, last)):
            _overtaken = (
                f"{what} is called in thread {me.name!r}, while thread {last.name!r}, which has called {_last_what}, "
                "is still running: on another rank they may come in another order, and each would get the numbers of "
                "the other. Call all that is Hocket's in one thread, or join() the other thread before. To load "
                "batches ahead, put the thread around the loader that you give to Hocket, or use "
                "DataLoader(num_workers=...)"
            )
            raise RuntimeError(_overtaken)
        _last, _last_what, _overtaken = me, what, ""
        _waited_for = _of_pool(me) is not None and _soon(_waits, main)


def _within(thread: threading.Thread) -> bool:
    """Return whether a thread is in a call of this package just now."""
    return any(_module(frame).startswith("hocket.parallel.") for frame in _frames(thread))


def _is_idle(thread: threading.Thread) -> bool:
    """Return whether a thread of a pool has no task: none of its frames is the program's."""
    return _of_pool(thread) is not None and all(_module(frame) in _POOLED for frame in _frames(thread))


def _of_pool(thread: threading.Thread) -> str | None:
    """Return the module of the pool that a thread belongs to, if it does."""
    return next((name for frame in _frames(thread) if (name := _module(frame)) in _POOLS), None)


def _soon(is_so: Callable[[threading.Thread], bool], thread: threading.Thread) -> bool:
    """Return whether it is so of a thread, or is in a moment: who gives a task, or ends one, has a few lines to go."""
    until_s = time.monotonic() + _SOON_S
    while not (found := is_so(thread)) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    return found


def _waits(thread: threading.Thread) -> bool:
    """Return whether a thread is in a wait of Python's own, at a pool's result or in a loop of asyncio."""
    where = [(_module(frame), frame.f_code.co_name) for frame in _frames(thread)]
    if not where or where[0] not in _WAITS:
        return False
    names = [name for name, _ in where]
    if names[0] == "selectors":
        return any(name.startswith("asyncio.") for name in names)
    of_python = next((at for at, name in enumerate(names) if name not in _POOLED), len(names))
    if ("threading", "start") in where[:of_python]:  # of the pool's thread, while the task is given
        return False
    return any(name.startswith("concurrent.") or name in _POOLS for name in names[:of_python])


def _frames(thread: threading.Thread) -> list[FrameType]:
    """Return where a thread is, the innermost first."""
    found, frame = [], sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
