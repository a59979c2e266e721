"""Ctrl-C while torch is being imported."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end if SIGINT came meanwhile; a second SIGINT ends the process at once.

    Extension modules written in C call Python code while they set themselves up. Some clear an error that it raises,
    so that a Ctrl-C in such a moment would have no effect; others abort the process. (Both seen with torch on a busy
    machine, in about one of twenty launches.) So nothing is raised before the import is over.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        del frame
        if asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        asked = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt
