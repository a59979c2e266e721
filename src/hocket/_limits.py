"""How much of the machine this process may use: what its control groups leave of memory and cores, as in containers."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_CACHED = ("active_file", "inactive_file")  # pages that the kernel gives up when memory is short


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


def kernel_kills() -> tuple[int | None, int | None]:
    """Return how many processes the kernel has killed for want of memory: of this control group, and of the machine.

    None: the kernel does not tell.
    """
    own = None
    for group in _control_groups("memory"):
        for name in ("memory.events", "memory.oom_control"):  # of version 2, and 1
            if own is None:
                own = _count(group / name)
    return own, _count(Path("/proc/vmstat"))


def _count(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        counts = dict(line.split() for line in path.read_text().splitlines())
        return int(counts["oom_kill"]) if "oom_kill" in counts else None
    return None


def processor() -> str:
    """Return the model of this machine's processors; "" where Linux does not tell it, as on ARM."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def usable_cores() -> int:
    """Return how many cores' time this process has, at least 1: those that it may run on, or fewer by a quota."""
    mine, quota = len(os.sched_getaffinity(0)), quota_cores()
    return mine if quota is None else min(mine, max(1, int(quota)))


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


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of those above it: see cgroups(7)."""
    for line in _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = _GROUPS / controller if controllers else _GROUPS  # version 1, or 2
            here = root / path.lstrip("/")
            # In a container the path may be the host's, which is not there: its own group is the root.
            yield from (one for one in (here, *here.parents) if one.is_relative_to(root))
