"""What a job may leave behind on a machine: shared memory and processes."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ._patience import deadline


def leftovers() -> set[str]:
    """Return this user's files in /dev/shm, and this process's descendants, as texts.

    The fork server of `run_ranks` and multiprocessing's resource tracker belong to the test run and do not count.
    """
    found = set()
    shm = Path("/dev/shm")
    if shm.is_dir():
        for path in shm.iterdir():
            with contextlib.suppress(OSError):
                if path.stat().st_uid == os.getuid():
                    found.add(f"file {path}")
    for pid, command in _descendants(os.getpid()).items():
        if "multiprocessing.forkserver" not in command and "resource_tracker" not in command:
            found.add(f"process {pid}: {command}")
    return found


def _descendants(root: int) -> dict[int, str]:
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text(errors="replace")
                state, parent = stat.rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
                    commands[int(entry.name)] = (
                        (entry / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
                    )
    family = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        if not more:
            return {pid: commands[pid] for pid in family - {root}}
        family |= more


@contextlib.contextmanager
def no_leftovers(within_s: float = 5.0) -> Iterator[None]:
    """Fail if the block leaves shared memory or processes that were not there before.

    Args:
        within_s: How long they may take to vanish, on an idle machine.

    Raises:
        AssertionError: with the list of what is left.
    """
    before = leftovers()
    yield
    deadline_s = time.monotonic() + deadline(within_s)
    while left := leftovers() - before:
        if time.monotonic() > deadline_s:
            raise AssertionError(f"left behind: {sorted(left)}")
        time.sleep(0.05)
