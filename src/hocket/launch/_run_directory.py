"""The directory of one `hocket run`: what was started, where and with what, what each rank printed, how it ended.

    runs/train-20261123-024512/
        run.json          command, directory, environment, versions, host, outcome, exit status, failures
        hocket.log        what the launcher said
        plan.toml         the plan that was carried out, written by rank 0
        rank-0.out, .err  what each rank printed, byte by byte
        record/           the records of all ranks, for `hocket explain` and `hocket report`

Each other host's launcher writes `run-node1.json` and `hocket-node1.log`, into the same directory where hosts share it.
Under `--hosts` what hosts have in a directory of their own is brought together at the end.
"""

import contextlib
import errno
import fcntl
import io
import itertools
import json
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hocket._files import write_whole
from hocket._tasks import described

from ._facts import program_facts, resources
from ._hosts import passed_on

RUN_VARIABLE = "HOCKET_RUN_DIR"  # for the ranks; also where the user says where to
NOWHERE = ("off", "0")  # what says, as that variable or as --run-dir, that no run is kept
_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|_KEY$|^KEY$", re.IGNORECASE)
_WORTH_SAYING = 0.25  # share of the steps' time that a verdict's cause costs
_DEAD_HOST_S = 100.0  # for file servers to give up the locks of a host that has died
_OTHERS = (
    "SLURM_", "OMPI_", "PMI", "SKYPILOT_", "RAY_", "PET_", "LANG", "TZ", "USER", "JOB_", "TORCHELASTIC_", "MALLOC_",
    "GLIBC_",
)  # fmt: skip


def default_run_directory(target: str, environment: Mapping[str, str]) -> str | None:
    """Return where the directory of a run of this program is to be made; None if the environment forbids one."""
    named = environment.get(RUN_VARIABLE)
    if "HOCKET_JOB" in environment:  # a `hocket run` inside another's rank is a part of that run
        return None
    if named:
        return None if named in NOWHERE else os.path.abspath(named)
    stamp = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    with contextlib.suppress(ValueError):  # the launchers of a job's hosts share one; a job that is queued again, too
        task = described(environment)
        if task is not None and task.size > 1:
            stamp = task.job
    return os.path.join("runs", re.sub(r"[^\w.-]+", "-", f"{Path(target).name.removesuffix('.py')}-{stamp}"))


def is_secret(name: str) -> bool:
    """Return whether a variable's name says that its value is nobody else's business."""
    return _SECRET.search(name) is not None


def shown_command(words: Sequence[str]) -> list[str]:
    """Return a command line without the values of `-x NAME=VALUE` whose name says that they are secret."""
    shown = list(words)
    for index, word in enumerate(shown[1:], 1):
        name, equals, _ = word.partition("=")
        if shown[index - 1] == "-x" and equals and is_secret(name):
            shown[index] = f"{name}=..."
    return shown


def worth_saying(record: str) -> Iterator[str]:
    """Yield what stands out in the ranks' records, a sentence each, and what a step should have taken."""
    if os.path.isdir(record):
        with contextlib.suppress(Exception):  # a record that cannot be read is no failure of the job
            from hocket.explain import explain

            explained = explain(record)
            for found in explained.verdicts:
                if found.kind == "memory growth" or (found.gain >= _WORTH_SAYING and found.kind != "busy machine"):
                    yield found.sentence
            yield from explained.brief()


class LaunchDirectory:
    """The files of one launcher in the directory of its run.

    Args:
        path: Where; it is made, and may be there already (a job that was queued again goes on in its directory).
        suffix: What the names of this launcher's own files end with, where several share the directory.
        new: Choose another name beside this one should it be taken.
        shared: Whether several launchers write its files without a suffix, as hosts do that have no numbers.

    Raises:
        OSError: It cannot be made, or another run is in it that has not ended.
    """

    def __init__(self, path: str, suffix: str = "", *, new: bool = False, shared: bool = False) -> None:
        runs = Path(path).parent
        if new:
            _check_own(runs)
        self._new, self._made_runs = new, new and runs.name == "runs" and not runs.exists()
        if self._made_runs:
            runs.mkdir(parents=True, exist_ok=True)
            (runs / ".gitignore").write_text("*\n")
        for number in itertools.count(1):
            self.path = os.path.abspath(f"{path}-{number}" if number > 1 else path)
            try:
                os.makedirs(self.path, exist_ok=not new)
                break
            except FileExistsError:  # of two runs that begin in the same second only one has made it
                if not new:
                    raise
        self._suffix = suffix
        self._facts: dict[str, Any] = {}
        self._lacks: str | None = None  # why something could not be written
        self._log = self.open(f"hocket{self._suffix}.log")
        if not shared:
            self._take()
        if not suffix:
            self.keep_record()

    def _take(self) -> None:
        """Hold this launcher's log as long as it lives: two runs would write one record, and rename each other's.

        The lock of a host that has died goes with its lease, where the directory is shared; so it is waited for.
        """
        until_s = time.monotonic() + _DEAD_HOST_S
        while True:
            try:
                fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if self._host() in (None, socket.gethostname()) or time.monotonic() > until_s:
                    self._log.close()
                    raise OSError(errno.EBUSY, "another run, which has not ended, is kept there") from None
            except OSError:  # a file system that knows no locks
                return
            time.sleep(1.0)

    def _host(self) -> str | None:
        """Return the host on which the run that is written down here was started, if one is."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(Path(self.path, f"run{self._suffix}.json").read_text())["host"]["host"])
        return None

    @property
    def joined(self) -> bool:
        """Whether it is also the first launcher's, who says where it is: the hosts share a disk."""
        return bool(self._suffix) and os.path.exists(os.path.join(self.path, "run.json"))

    @property
    def record(self) -> str:
        """Where the ranks' records are."""
        return os.path.join(self.path, "record")

    def open(self, name: str) -> io.FileIO:
        """Open a file of this directory, to write at its end."""
        return io.FileIO(os.path.join(self.path, name), "a")

    def began(self, *, target: str, arguments: Sequence[str], environment: Mapping[str, str], **facts: Any) -> None:
        """Write what is started, with what and where."""
        kept = {**passed_on(), **{name: value for name, value in os.environ.items() if name.startswith(_OTHERS)}}
        kept.update(environment)
        self._write(
            command=shown_command(sys.argv),
            target=target,
            arguments=list(arguments),
            directory=os.getcwd(),
            started=_now(),
            **facts,
            versions=program_facts(target),
            host=resources(),
            environment={name: kept[name] for name in sorted(kept) if not is_secret(name)},
        )

    def note(self, lines: Sequence[str]) -> None:
        """Keep what the launcher says."""
        try:
            self._log.write("".join(f"{_now()} {line}\n" for line in lines).encode(errors="replace"))
        except OSError as error:
            self._lacks = error.strerror

    def kept(self) -> str:
        """Return the sentence that says where the run is, and whether all of it."""
        where = f"this run is kept in {os.path.relpath(self.path)}"
        return where if self._lacks is None else f"{where}, but not whole: {self._lacks}"

    def keep_record(self) -> None:
        """Give the records of an attempt that is over a name of their own, before the next begins."""
        if os.path.isdir(self.record):
            free = next(name for n in range(1, 10_000) if not os.path.exists(name := f"{self.record}-{n}"))
            with contextlib.suppress(OSError):
                os.rename(self.record, free)

    def ended(self, **facts: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk; the exit code says how it ended, too
            self._write(ended=_now(), **facts)
        self._log.close()

    def never_began(self, reason: str) -> None:
        """Remove the directory of a job without ranks; one that others know by its name says why there are none."""
        own = {f"run{self._suffix}.json", f"hocket{self._suffix}.log"}
        if not self._new or set(os.listdir(self.path)) - own:
            self.note([reason])
            self.ended(outcome="failed", exit_code=1, error=reason)
            return
        self._log.close()
        with contextlib.suppress(OSError):  # another host's launcher may write there meanwhile
            for name in own:
                Path(self.path, name).unlink(missing_ok=True)
            os.rmdir(self.path)
            runs = Path(self.path).parent
            if self._made_runs and os.listdir(runs) == [".gitignore"]:
                (runs / ".gitignore").unlink()
                runs.rmdir()

    def _write(self, **facts: Any) -> None:
        self._facts |= facts
        text = json.dumps(self._facts, indent=2, default=str) + "\n"
        write_whole(Path(self.path, f"run{self._suffix}.json"), text)


def _check_own(runs: Path) -> None:
    """Raise PermissionError where another user could have our files written into his, or others of ours."""
    with contextlib.suppress(FileNotFoundError):
        found, above = os.lstat(runs), os.stat(runs.parent)
        if found.st_uid not in (0, os.geteuid()) and above.st_mode & stat.S_ISVTX and above.st_mode & stat.S_IWOTH:
            text = f"{runs} is another user's, in a directory where all may write; name a directory with --run-dir"
            raise PermissionError(errno.EACCES, text)


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
