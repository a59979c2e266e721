"""Scripts as ranks that need not import torch anew, and what tests see of processes that anybody has started."""

import contextlib
import io
import os
import random
import runpy
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hocket.testing import deadline, run_ranks


def script_output(path: Path, *arguments: str, n: int = 1, cwd: Path | None = None, timeout_s: float = 110.0) -> str:
    """Return what rank 0 prints of a script that `n` ranks run, or one process without a launcher.

    They fork from the server of `run_ranks`, and see what `hocket run` shows its ranks; none imports torch for seconds.
    """
    return script_outputs(path, *arguments, n=n, cwd=cwd, timeout_s=timeout_s)[0]


def script_outputs(
    path: Path, *arguments: str, n: int = 1, cwd: Path | None = None, timeout_s: float = 110.0
) -> list[str]:
    """Return what each rank prints, as `script_output` does of rank 0."""
    return run_ranks(_as_main, n, str(path), arguments, str(cwd or ""), backend=None, timeout_s=timeout_s)


def _as_main(path: str, arguments: tuple[str, ...], cwd: str) -> str:
    if os.environ["WORLD_SIZE"] == "1":
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    return as_main(path, arguments, cwd)


def as_main(path: str, arguments: tuple[str, ...], cwd: str = "") -> str:
    """Run a script in this process, which is a rank; what it prints."""
    if cwd:
        os.chdir(cwd)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise
    return out.getvalue()


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


def free_port() -> int:
    """Return a port that nobody listens on, and that no other process gets by asking for any: below those ports."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def until(condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """Wait until something is so; what it is. The limit is that of an idle machine."""
    begin_s = time.monotonic()
    while not (value := condition()):
        late_s = time.monotonic() - begin_s
        assert late_s < limit_s or late_s < deadline(limit_s), "it did not happen in time"
        time.sleep(0.01)
    return value
