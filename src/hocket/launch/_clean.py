"""What crashed jobs of this user have left on this host: found, and removed."""

import os
from dataclasses import dataclass
from pathlib import Path

from hocket import _sweep

from ._job import is_abandoned, job_directories

GRACE_S = 3.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True, slots=True)
class Leftover:
    """What is left of one job whose launcher has gone.

    Attributes:
        job: The job's name.
        directory: Its directory, if it is still there.
        nbytes: What the directory holds.
        processes: Its processes that still run.
    """

    job: str
    directory: str | None
    nbytes: int
    processes: tuple[int, ...]


def leftovers() -> list[Leftover]:
    """Find what is left of jobs whose launcher and warden have both been killed."""
    directories = job_directories()
    running: dict[str, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            job = _sweep.job_of(int(name))
            if job is not None and _sweep.start_ticks(int(name)) is not None:
                running.setdefault(job, []).append(int(name))
    found = []
    for job in sorted({*directories, *running}):
        if is_abandoned(job):
            directory = directories.get(job)
            found.append(Leftover(job, directory, _nbytes(directory), tuple(sorted(running.get(job, ())))))
    return found


def sweep_abandoned() -> list[str]:
    """Remove what jobs have left whose launcher has gone, and return their names; what a warden is at is left to it.

    Every launch does so when it begins. Such jobs are known by their directories, which are removed last.
    """
    abandoned = {job: directory for job, directory in job_directories().items() if is_abandoned(job)}
    if abandoned:
        tended = {_sweep.warden_of(int(name)) for name in os.listdir("/proc") if name.isdigit()}
        abandoned = {job: directory for job, directory in abandoned.items() if job not in tended}
    for job, directory in abandoned.items():
        _sweep.sweep(job, directory, (), GRACE_S)
    return [job for job, directory in abandoned.items() if not os.path.lexists(directory)]


def remove_leftover(leftover: Leftover) -> bool:
    """End the processes and delete the directory; return whether it is gone."""
    _sweep.sweep(leftover.job, leftover.directory or "", leftover.processes, GRACE_S)
    return leftover.directory is None or not os.path.lexists(leftover.directory)


def _nbytes(directory: str | None) -> int:
    if directory is None:
        return 0
    return sum(path.lstat().st_size for path in Path(directory).rglob("*") if path.is_file())
