"""What a host is and has: what must be alike on all hosts of a job, and what a reader of a run wants to know later."""

import contextlib
import hashlib
import os
import resource
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

from hocket._limits import memory, usable_cores
from hocket._versions import installed, versions

MASTER_PORT = 29500  # that torchrun takes where nobody says one


def program_facts(script: str | None) -> dict[str, str | None]:
    """Return the versions of what computes, and a checksum of the script; None for what is not there."""
    digest = None
    if script is not None:
        with contextlib.suppress(OSError), open(script, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    return {**versions(installed), "script": digest}


def resources() -> dict[str, Any]:
    """Return what this host has, sizes in bytes, without importing torch."""
    total, free = memory()
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "kernel": os.uname().release,
        "cores": usable_cores(),
        "memory": total,
        "memory_free": free,
        "dev_shm": shared.total if shared else 0,
        "dev_shm_free": shared.free if shared else 0,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "gpus": _gpus(),
        "host": socket.gethostname(),
    }


def _gpus() -> list[str]:
    """Return the models of the NVIDIA GPUs, as their driver tells them."""
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = dict(line.partition(":")[::2] for line in path.read_text().splitlines())
        found.append(lines.get("Model", "unknown").strip())
    return found


def switches() -> list[str]:
    """Return the switches of this Python that others are to have too, as multiprocessing has it: -O, -W, -X."""
    found: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return found


def free_port() -> int:
    """Return a port for a store that a rank may want to open, also on a host of IPv6 alone; Hocket opens none."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError), socket.socket(family) as free:
            free.bind((address, 0))
            return int(free.getsockname()[1])
    return MASTER_PORT  # this host has no address of its own
