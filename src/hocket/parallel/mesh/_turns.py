"""Threads and collective operations: those of two threads would meet in another order on each rank."""

import sys
import threading
import weakref

_lock = threading.Lock()
_last: threading.Thread = threading.main_thread()
_last_what = "nothing yet"
_earlier: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # that have called before the last


def in_turn(what: str) -> None:
    """Refuse a collective operation if the thread that has called the last one may call again.

    A program may build in its main thread and train in another, and go on in the main thread when that has ended. Two
    threads that run at once take turns in another order on each rank: their operations would meet each other's, and
    give one's numbers to the other where sizes are alike.

    Args:
        what: the thing that is called, for the message.

    Raises:
        RuntimeError: another thread that has called is still running.
    """
    global _last, _last_what
    me, last = threading.current_thread(), _last
    if me is last:
        _last_what = what
        return
    if isinstance(me, threading._DummyThread):  # of no known end: made by C++ or by another language
        return
    with _lock:
        hands_over = last is threading.main_thread() and me not in _earlier and not _within(last)
        if last.is_alive() and not hands_over:
            raise RuntimeError(
                f"{what} is called in thread {me.name!r}, while thread {last.name!r}, which has called {_last_what}, "
                "is still running: on another rank they may come in another order, and each would get the numbers of "
                "the other. Call all that is Hocket's in one thread, or join() the other thread before. To load "
                "batches ahead, put the thread around the loader that you give to Hocket, or use "
                "DataLoader(num_workers=...)"
            )
        _earlier.add(last)
        _last, _last_what = me, what


def _within(thread: threading.Thread) -> bool:
    """Return whether a thread is in a call of this package just now."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("hocket.parallel."):
            return True
        frame = frame.f_back
    return False
