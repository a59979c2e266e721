"""What tests see of processes that they, or those whom they started, have started."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hocket.testing import deadline


def processes_with(variable: str, value: object) -> list[int]:
    """The other processes that still run and have a variable with this value in their environment."""
    mark = f"{variable}={value}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
            except OSError:  # it has ended, or is another user's
                continue
    return found


def until(condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """Wait until something is so; what it is. The limit is that of an idle machine."""
    begin_s = time.monotonic()
    while not (value := condition()):
        late_s = time.monotonic() - begin_s
        assert late_s < limit_s or late_s < deadline(limit_s), "it did not happen in time"
        time.sleep(0.01)
    return value
