"""Signals that come to `hocket run` while it is being loaded, which may take seconds: standard library, loaded at once.

A notice (SIGUSR1, by which schedulers tell that a job's time is nearly over) waits for the ranks. What is to end the
job ends this process by that signal, as it would else, with a line that says so; there is nothing yet to clean up.
"""

import contextlib
import os
import signal
from types import FrameType
from typing import Final

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
_noticed: set[int] = set()  # notices that nobody has taken


def keep_notices() -> None:
    """Let notices wait from here on."""
    signal.signal(signal.SIGUSR1, _note)


def listen() -> None:
    """Handle all these signals from here on, until others do; an end that this process is to ignore stays ignored."""
    keep_notices()
    for number in _ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)


def leave() -> None:
    """Handle them no more; notices still end nothing."""
    if signal.getsignal(signal.SIGUSR1) == _note:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for number in _ENDING:
        if signal.getsignal(number) == _end:
            signal.signal(number, signal.SIG_DFL)


def noticed(number: int) -> bool:
    """Return whether a notice has come early, once."""
    found = number in _noticed
    _noticed.discard(number)
    return found


def _note(number: int, frame: FrameType | None) -> None:
    del frame
    _noticed.add(number)


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    with contextlib.suppress(OSError):  # nobody reads
        name = signal.Signals(number).name
        os.write(2, f"hocket: {name} before any rank was started, exit status {128 + number}\n".encode())
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
