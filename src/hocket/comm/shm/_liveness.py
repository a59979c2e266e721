"""Which peers of this host have ended: by a descriptor of each process, which says so without asking it."""

import os
import select
from typing import Final

from hocket._sweep import stat_of

LONGER: Final = "If it only needs longer: HOCKET_TIMEOUT=SECONDS, or timeout_s of hocket.distribute and hocket.Trainer"


def state_of(pid: int) -> str:
    """Return, for a message, that a process of this host is stopped and how it goes on; "" if it is not."""
    stopped = stat_of(pid)[:1] in (["T"], ["t"])
    return f" and is stopped (SIGSTOP; `kill -CONT {pid}` lets it go on)" if stopped else ""


class Liveness:
    """Watches processes by the ranks that they are."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._ranks_by_fd: dict[int, int] = {}
        self._pids: dict[int, int] = {}

    def watch(self, rank: int, pid: int) -> None:
        """Watch a process from now on. Raises OSError: there is no such process."""
        fd = os.pidfd_open(pid)
        self._ranks_by_fd[fd] = rank
        self._pids[rank] = pid
        self._poll.register(fd, select.POLLIN)

    def ranks(self) -> set[int]:
        """Return those whose processes have ended; never waits."""
        return {self._ranks_by_fd[fd] for fd, _ in self._poll.poll(0)}

    def state(self, rank: int) -> str:
        """Return what `state_of` says of a rank's process."""
        return state_of(self._pids[rank]) if rank in self._pids else ""

    def close(self) -> None:
        """Watch nobody any more."""
        for fd in self._ranks_by_fd:
            os.close(fd)
        self._ranks_by_fd, self._poll = {}, select.poll()
