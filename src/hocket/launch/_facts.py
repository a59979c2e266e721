"""What a host is and has: what must be alike on all hosts of a job, and what a reader of a run wants to know later."""

import contextlib
import hashlib
import importlib.metadata
import os
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PORT = 29500  # torchrun's --master-port, where this host has no address of its own


def versions(script: str | None) -> dict[str, str | None]:
    """Return the versions of what computes, and a checksum of the script; None for what is not there."""
    found: dict[str, str | None] = {"Python": ".".join(map(str, sys.version_info[:3]))}
    found["script"] = None
    if script is not None:
        with contextlib.suppress(OSError), open(script, "rb") as file:
            found["script"] = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    for name in ("torch", "hocket", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from a source tree
            found[name] = None
    return found


def resources() -> dict[str, Any]:
    """Return what this host has, sizes in bytes, without importing torch."""
    total, free = memory()
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "kernel": os.uname().release,
        "cores": len(os.sched_getaffinity(0)),
        "memory": total,
        "memory_free": free,
        "dev_shm": shared.total if shared else 0,
        "dev_shm_free": shared.free if shared else 0,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "gpus": _gpus(),
        "host": socket.gethostname(),
    }


def memory() -> tuple[int, int]:
    """Return the bytes of memory that this process may use, and how many of them are free: the host's, or less."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    for group in _control_groups("memory"):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # "max", or of the other version
                most, used = (int((group / name).read_text()) for name in (limit, usage))
                pages = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                cached = sum(int(pages.get(f"total_{name}", pages.get(name, 0))) for name in _CACHED)
                total, free = min(total, most), min(free, max(0, most - used + cached))
    return total, free


def quota_cores() -> float | None:
    """Return how many cores' time the control groups of this process leave it; None for no limit."""
    found = []
    for group in _control_groups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with contextlib.suppress(OSError, ValueError):
                quota, period = (int(word) for name in names for word in (group / name).read_text().split())
                if quota > 0:
                    found.append(quota / period)
    return min(found, default=None)


_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_CACHED = ("active_file", "inactive_file")  # pages that the kernel gives up when memory is short


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of those above it: see cgroups(7)."""
    for line in _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = _GROUPS / controller if controllers else _GROUPS  # version 1, or 2
            here = root / path.lstrip("/")
            # In a container the path may be the host's, which is not there: its own group is the root.
            yield from (one for one in (here, *here.parents) if one.is_relative_to(root))


def _gpus() -> list[str]:
    """Return the models of the NVIDIA GPUs, as their driver tells them."""
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = dict(line.partition(":")[::2] for line in path.read_text().splitlines())
        found.append(lines.get("Model", "unknown").strip())
    return found


def free_port() -> int:
    """Return a port for a store that a rank may want to open, also on a host of IPv6 alone; Hocket opens none."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError), socket.socket(family) as free:
            free.bind((address, 0))
            return int(free.getsockname()[1])
    return _PORT
