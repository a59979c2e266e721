"""A rank as a process of ours, and how it ended, without taking that from who waits for it."""

import os
import time
from dataclasses import dataclass
from subprocess import Popen
from typing import Any


@dataclass(slots=True)
class Child:
    """A rank as a process: a child of ours that leads a process group."""

    rank: int  # its number among all ranks
    process: Popen[Any]  # whose `returncode` tells its status once another thread has taken that from the kernel

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    def status(self, *, patient: bool = True) -> int | None:
        """Return a child's status, or minus its signal, and leave it for whoever waits; None if it has not ended."""
        for _ in range(100 if patient else 1):  # the waiting thread may be between taking the status and saying so
            try:
                state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                status = self.process.returncode
            else:
                status = None
                if state is not None:
                    status = state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
            if status is not None or not patient:
                return status
            time.sleep(0.001)
        return None
