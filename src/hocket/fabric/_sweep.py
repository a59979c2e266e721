"""The end of a fabric: its processes, its files; the namespaces then go by themselves.

A network namespace lives while a process is in it or holds it open. The keeper holds them all; whoever kills the
keeper leaves only the processes that run in hosts, and for those there is the warden: a child of the keeper that sees
a pipe close.
"""

import contextlib
import json
import os
import signal
from collections.abc import Callable

from hocket._sweep import end_processes, variable_of, warden_of

from ._namespace import in_network

GRACE_S = 5.0
_WARDEN_GRACE_S = 15.0  # for wardens of launches to clean up once all others have ended; a busy machine takes long


def end_in_network(numbers: set[int], grace_s: float, wanted: Callable[[int], bool] = lambda pid: True) -> None:
    """Send SIGTERM to all that runs in these network namespaces, and after `grace_s` seconds SIGKILL.

    The wardens of launches come last: they clean up after the others.
    """

    def found() -> list[int]:
        return [pid for pid in in_network(numbers) if pid != os.getpid() and wanted(pid)]

    end_processes(lambda: [pid for pid in found() if warden_of(pid) is None], grace_s)
    end_processes(found, _WARDEN_GRACE_S)


def belongs_to(name: str) -> Callable[[int], bool]:
    """Tell by its environment whether a process was started in a fabric; for one whose keeper has long gone.

    The kernel gives the numbers of namespaces that have gone to new ones.
    """
    return lambda pid: variable_of(pid, "HOCKET_FABRIC") == name


def remove_files(paths: tuple[str, ...]) -> None:
    """Remove what there is of these."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_files_of(keeper: int, paths: tuple[str, ...]) -> None:
    """Remove a fabric's files, of which the first holds its name, unless the name is another fabric's by now."""
    with contextlib.suppress(OSError, ValueError), open(paths[0]) as file:
        if json.load(file)["keeper"] != keeper:
            return
    remove_files(paths[::-1])  # the name last: what is removed after it could be another's


def stand_by(pipe: int, keeper: int, numbers: set[int], paths: tuple[str, ...]) -> None:
    """Run as the warden: wait until the keeper has gone, then end what it left. Ends this process.

    The keeper holds the other end of the pipe; a byte from there says that all is well.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # what ends the keeper must not end us first
        signal.signal(number, signal.SIG_IGN)
    if not os.read(pipe, 1):
        end_in_network(numbers, GRACE_S)
        remove_files_of(keeper, paths)
    os._exit(0)
