"""A rank as a process of ours, and how it ended, without taking that from who waits for it."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Child:
    """A rank as a process: a child of ours that leads a process group."""

    rank: int  # its number among all ranks
    pid: int  # its process
    # asks for its status (minus the signal that ended it), once another thread has taken that from the kernel
    reaped_status: Callable[[], int | None]

    def status(self, *, patient: bool = True) -> int | None:
        """Return a child's status, or minus its signal, and leave it for whoever waits; None if it has not ended."""
        for _ in range(100 if patient else 1):  # the waiting thread may be between taking the status and saying so
            try:
                state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                status = self.reaped_status()
            else:
                status = None
                if state is not None:
                    status = state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
            if status is not None or not patient:
                return status
            time.sleep(0.001)
        return None
