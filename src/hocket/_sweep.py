"""Ends processes of this host, and all that a job has: processes, whoever started them, directory, shared memory.

A job's processes carry its name in the environment variable HOCKET_JOB, which children inherit. The launcher sweeps
when a job ends. Should the launcher itself be killed, the job's warden does: this file, run as a process of its own,
which reads from a pipe that closes when the launcher dies.

    python -I -S _sweep.py JOB DIRECTORY GRACE_S  <  "rank PID" lines, then "done"

Only the standard library is imported here, and nothing of hocket: the warden must start at once and weigh little.
"""

import contextlib
import glob
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable

JOB_VARIABLE = "HOCKET_JOB"
WARDEN_VARIABLE = "HOCKET_WARDEN"  # by which a warden is known: whoever ends all processes ends wardens last
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""What ends the launcher must not end the warden first."""
NO_PROC = "/proc, by which processes are found, is not mounted here: mount -t proc proc /proc"
_POLL_S = 0.02
_KILL_DEADLINE_S = 5.0  # SIGKILL acts at once but for processes in uninterruptible sleep, which nothing can end


def stat_of(pid: int) -> list[str]:
    """Return what the kernel tells of a process, from its state on, see proc(5); nothing if there is none."""
    try:
        # A process's name is cut at 15 bytes, also within a letter.
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks after boot; None if there is none (or only its zombie).

    A process identifier together with its start names one process for as long as the machine runs.
    """
    fields = stat_of(pid)
    return None if not fields or fields[0] in ("Z", "X") else int(fields[19])


def variable_of(pid: int, name: str) -> str | None:
    """Return a variable of the environment that a process began with; None without it, or if it is another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
    except OSError:
        return None
    key = f"{name}=".encode()
    return next(
        (item[len(key) :].decode(errors="replace") for item in environment.split(b"\0") if item.startswith(key)), None
    )


def end_processes(find: Callable[[], Iterable[int]], grace_s: float) -> set[int]:
    """Send SIGTERM, and after `grace_s` seconds SIGKILL, until `find` finds none; return all that were found."""
    begin_s = time.monotonic()
    killing_s: float | None = None
    sent: set[tuple[int, int]] = set()
    while pids := list(find()):
        now_s = time.monotonic()
        number = signal.SIGTERM if now_s - begin_s < grace_s else signal.SIGKILL
        if number == signal.SIGKILL:
            # Counted from the first SIGKILL, not from the start: this process may have been stopped meanwhile.
            killing_s = killing_s or now_s
            if now_s - killing_s > _KILL_DEADLINE_S:
                break
        for pid in pids:
            if (pid, number) not in sent:
                sent.add((pid, number))
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        time.sleep(_POLL_S)
    return {pid for pid, _ in sent}


def job_of(pid: int) -> str | None:
    """Return the job that a process was started in; None if it is in none or is another user's."""
    return variable_of(pid, JOB_VARIABLE)


def job_processes(job: str) -> list[int]:
    """Return the live processes of a job, but for our own."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return [pid for pid in pids if job_of(pid) == job and start_ticks(pid) is not None]


def warden_of(pid: int) -> str | None:
    """Return the job whose warden a process is; None if it is none or another user's."""
    return variable_of(pid, WARDEN_VARIABLE)


def sweep(job: str, directory: str, ranks: Iterable[int], grace_s: float) -> None:
    """End the job's processes, and remove its directory and what shared memory its processes left."""
    gone = end_processes(lambda: job_processes(job), grace_s)
    forked: list[int] = []  # as ranks tell, `launch/_worker.py`
    with contextlib.suppress(OSError):
        forked = [int(name[7:]) for name in os.listdir(directory or "/nowhere") if name.startswith("forked-")]
    for pid in {*gone, *ranks, *forked}:
        if start_ticks(pid) is None:  # a rank may have ended long ago, and its number may be another's now
            for path in glob.glob(f"/dev/shm/torch_{pid}_*"):  # torch's name for a tensor shared by file
                with contextlib.suppress(OSError):
                    os.unlink(path)
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    """Run as the warden: wait for the launcher's end, and sweep if it came without a "done"."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    job, directory, grace_s = sys.argv[1:4]
    ranks = set()
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "done":
            return
        ranks.add(int(rest))
    sweep(job, directory, ranks, float(grace_s))


if __name__ == "__main__":
    main()
