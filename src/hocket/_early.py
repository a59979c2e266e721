"""Signals that come to `hocket run` while it is being loaded, or has ended: standard library, loaded at once.

A notice (SIGUSR1, by which schedulers tell that a job's time is nearly over) waits for the ranks. What is to end the
job ends this process by that signal, as it would else, with a line that says so; there is nothing yet to clean up. Once
the ranks have ended, nothing that comes changes the exit status: where one launcher has ended by 75, srun sends SIGTERM
to those of the other nodes.
"""

import contextlib
import os
import signal
from types import FrameType
from typing import Final

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
_LAST_S: Final = 5.0  # after an ending signal, for a command that has to say how its ranks have ended
_noticed: set[int] = set()  # notices that nobody has taken
_minded: set[int] = set()  # what is to end the command, and was not ignored when it began


def keep_notices() -> None:
    """Let notices wait from here on."""
    signal.signal(signal.SIGUSR1, _note)


def listen() -> None:
    """Handle all these signals from here on, until others do; an end that this process is to ignore stays ignored."""
    keep_notices()
    for number in _ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)
            _minded.add(number)


def stays_ignored(number: int) -> bool:
    """Return whether a signal that is ignored while the job is cleaned up is to be so from there on."""
    return number in _minded


def ended(status: int) -> None:
    """Let the command end by this status whatever comes; within some seconds then, if nobody reads what it says."""
    if _minded:
        signal.signal(signal.SIGALRM, lambda *_: os._exit(status))
    for number in _minded:
        signal.signal(number, lambda *_: signal.setitimer(signal.ITIMER_REAL, _LAST_S))


def all_said() -> None:
    """Ignore these signals from here on: Python takes its handlers away before it ends."""
    for number in (*_minded, signal.SIGALRM) if _minded else ():
        signal.signal(number, signal.SIG_IGN)


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
