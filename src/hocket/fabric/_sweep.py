"""The end of a fabric: its processes, its files; the namespaces then go by themselves.

A network namespace lives while a process is in it or holds it open. The keeper holds them all; whoever kills the
keeper leaves only the processes that run in hosts, and for those there is the warden: a child of the keeper that sees
a pipe close.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable

from ._namespace import in_network

GRACE_S = 5.0  # longer than a launch's own warden takes, so that it can clean up after its ranks
_KILL_DEADLINE_S = 5.0
_POLL_S = 0.02
_MARK = b"HOCKET_FABRIC="


def end_processes(numbers: set[int], grace_s: float, wanted: Callable[[int], bool] = lambda pid: True) -> None:
    """Send SIGTERM to all that runs in these network namespaces, and after `grace_s` seconds SIGKILL."""
    begin_s = time.monotonic()
    killing_s: float | None = None
    sent: set[tuple[int, int]] = set()
    while pids := [pid for pid in in_network(numbers) if pid != os.getpid() and wanted(pid)]:
        now_s = time.monotonic()
        number = signal.SIGTERM if now_s - begin_s < grace_s else signal.SIGKILL
        if number == signal.SIGKILL:
            # Counted from the first SIGKILL, not from the start: this process may have been stopped meanwhile.
            killing_s = killing_s or now_s
            if now_s - killing_s > _KILL_DEADLINE_S:
                return
        for pid in pids:
            if (pid, number) not in sent:
                sent.add((pid, number))
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        time.sleep(_POLL_S)


def belongs_to(name: str) -> Callable[[int], bool]:
    """Tells by its environment whether a process was started in a fabric; for one whose keeper has long gone.

    The kernel gives the numbers of namespaces that have gone to new ones.
    """

    def wanted(pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                return _MARK + name.encode() in file.read().split(b"\0")
        except OSError:
            return False

    return wanted


def remove_files(paths: tuple[str, ...]) -> None:
    """Remove what there is of these."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def stand_by(pipe: int, keeper: int, numbers: set[int], paths: tuple[str, ...]) -> None:
    """The warden: wait until the keeper has gone, then end what it left. Ends this process.

    Args:
        pipe: what the keeper holds the other end of; a byte from there says that all is well.
        keeper: the process.
        numbers: of the namespaces.
        paths: the fabric's file, and what goes with it.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # what ends the keeper must not end us first
        signal.signal(number, signal.SIG_IGN)
    if not os.read(pipe, 1):
        end_processes(numbers, GRACE_S)
        with contextlib.suppress(OSError, ValueError), open(paths[0]) as file:
            if json.load(file)["keeper"] == keeper:  # else the name is another fabric's by now
                remove_files(paths)
    os._exit(0)
