"""Which peers of this host have ended: by a descriptor of each process, which says so without asking it."""

import os
import select


class Liveness:
    """Watches processes by the ranks that they are."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._ranks_by_fd: dict[int, int] = {}

    def watch(self, rank: int, pid: int) -> None:
        """Watch a process from now on. Raises OSError: there is no such process."""
        fd = os.pidfd_open(pid)
        self._ranks_by_fd[fd] = rank
        self._poll.register(fd, select.POLLIN)

    def ranks(self) -> set[int]:
        """Return those whose processes have ended; never waits."""
        return {self._ranks_by_fd[fd] for fd, _ in self._poll.poll(0)}

    def close(self) -> None:
        """Watch nobody any more."""
        for fd in self._ranks_by_fd:
            os.close(fd)
        self._ranks_by_fd, self._poll = {}, select.poll()
