"""One launch on this host: its name, its directory, its warden, and its end."""

import contextlib
import hashlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from hocket import _sweep

from ._failure import LaunchError, of_processes

WARDEN_GRACE_S = 3.0  # between SIGTERM and SIGKILL for ranks whose launcher was killed
SAVED = 75  # exit status, EX_TEMPFAIL of <sysexits.h>: the ranks have saved; start it again, and it goes on
SAVED_MARK = "HOCKET_SAVED_MARK"  # a file that says so instead, for launchers whose statuses must all be 0
PASSED_ON = signal.SIGUSR1  # ends nothing here; by it Slurm's --signal tells that the time limit is near
_PREFIX = "hocket-job-"


def new_job_name() -> str:
    """`PID-START-PLACE-RANDOM` of the launcher: enough to tell later whether it still runs."""
    pid = os.getpid()
    return f"{pid}-{_sweep.start_ticks(pid)}-{_place()}-{secrets.token_hex(4)}"


def is_abandoned(job: str) -> bool:
    """Return whether a job's launcher has gone; of one in another process namespace or host that cannot be known."""
    pid, started, place, *_ = [*job.split("-"), "", "", ""]
    if not (pid.isdigit() and started.isdigit()) or place != _place():
        return False
    return _sweep.start_ticks(int(pid)) != int(started)


def _place() -> str:
    """Return what names this process namespace and host: hosts may share the temporary directory.

    The first namespace of every host has the same number.
    """
    names = f"{os.stat('/proc/self/ns/pid').st_ino} {os.uname().nodename}"
    return hashlib.sha256(names.encode(errors="replace")).hexdigest()[:10]


def job_directories() -> dict[str, str]:
    """Return the directories of all jobs of this user on this host, running or not, by the job's name."""
    found = {}
    for entry in os.scandir(tempfile.gettempdir()):
        with contextlib.suppress(FileNotFoundError):
            ours = entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
            if entry.name.startswith(_PREFIX) and ours:
                found[entry.name.removeprefix(_PREFIX)] = entry.path
    return found


@contextlib.contextmanager
def blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Open a block in which signals wait; what starts in it inherits that, and hears of them when it can mind them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Open a block whose OSError is a LaunchError."""
    try:
        yield
    except OSError as error:
        proc = "" if os.path.exists("/proc/self/stat") else f"; {_sweep.NO_PROC}"
        elsewhere = "" if error.filename == sys.executable else "; TMPDIR names another temporary directory"
        remedy = proc or of_processes(error) or elsewhere
        raise LaunchError(f"the job cannot begin: {error}{remedy}") from None


class Job:
    """A context: inside it ranks may be started; after it nothing of them is left.

    Raises:
        LaunchError: It cannot have a directory or a warden.
    """

    @_told()
    def __init__(self) -> None:
        self.name = new_job_name()  # what HOCKET_JOB is set to in the ranks
        # a directory for error files and the like, removed at the end
        self.directory = os.path.join(tempfile.gettempdir(), _PREFIX + self.name)
        self._ranks: set[int] = set()
        self._warden: subprocess.Popen[str] | None = None
        self._ended = False

    @_told()
    def __enter__(self) -> Self:
        os.mkdir(self.directory, mode=0o700)
        environment = {key: value for key, value in os.environ.items() if key != _sweep.JOB_VARIABLE}
        environment[_sweep.WARDEN_VARIABLE] = self.name
        command = [sys.executable, "-I", "-S", _sweep.__file__, self.name, self.directory, str(WARDEN_GRACE_S)]
        try:
            # What ends this process, or all of a fabric, is not to end it before it ignores that.
            with blocked(_sweep.IGNORED):
                self._warden = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    text=True,
                )
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        return self

    def add_rank(self, pid: int) -> None:
        """Say that a rank runs as this process."""
        self._ranks.add(pid)
        self._tell(f"rank {pid}")

    def forked(self) -> dict[int, int]:
        """Return the live processes that the ranks' programs have forked and that run no other program, with the rank.

        Those of multiprocessing, data loaders' workers say, are not among them.
        """
        found = {}
        for path in Path(self.directory).glob("forked-*"):
            pid = int(path.name.removeprefix("forked-"))
            with contextlib.suppress(OSError, ValueError):  # an empty file is one of multiprocessing's
                rank, command = int(path.read_text()), Path(f"/proc/{pid}/cmdline").read_bytes()
                same = os.fsencode(self.directory) in command.split(b"\0")  # else it is another program by now
                if same and _sweep.start_ticks(pid) is not None:
                    found[pid] = rank
        return found

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End what is left of the job; a second call does nothing."""
        if self._ended:
            return
        _sweep.sweep(self.name, self.directory, self._ranks, grace_s=0.0)
        if self._warden is not None:
            self._tell("done")
            assert self._warden.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._warden.stdin.close()
            try:
                self._warden.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                self._warden.kill()
                self._warden.wait()
        self._ended = True

    def _tell(self, line: str) -> None:
        if self._warden is not None and self._warden.stdin is not None:
            # The warden was killed (the ranks still have their launcher), or an `end` before this was interrupted.
            with contextlib.suppress(BrokenPipeError, ValueError):
                print(line, file=self._warden.stdin, flush=True)
