"""The signals that end a job, while the launcher runs one."""

import contextlib
import signal
import threading
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class EndingSignals(contextlib.AbstractContextManager["EndingSignals"]):
    """Gives back at its end the handlers that elastic replaces; nothing may interrupt the clean-up before that."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "EndingSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in _NUMBERS}
        return self

    def ignore(self) -> None:
        """From here on nothing interrupts."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
