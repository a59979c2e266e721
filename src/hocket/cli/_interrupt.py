"""Ctrl-C while torch is being imported."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """Raises KeyboardInterrupt at the end if one was raised meanwhile and got lost.

    Extension modules written in C clear errors that are raised in Python code they call while they set themselves up; a
    Ctrl-C in such a moment would have no effect. (Seen with torch on a busy machine, in one of twenty launches.)
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt
