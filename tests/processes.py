"""Scripts as ranks that need not import torch anew, and what tests see of processes that anybody has started."""

import atexit
import contextlib
import io
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from hocket.testing import deadline, run_ranks

# What a main program has lives as long as its process: Gloo's threads can hang where it is freed before.
_alive: list[Any] = []


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
            _alive.append(runpy.run_path(path, run_name="__main__"))
        except SystemExit as ended:
            if ended.code:
                raise
    return out.getvalue()


def hocket_forked(
    *words: str, cwd: Path, env: Mapping[str, str] | None = None, timeout_s: float = 110.0
) -> "subprocess.CompletedProcess[str]":
    """Run the command `hocket` in a fork of the server of `run_ranks`, and its ranks in forks of that.

    All else is as a user has it: the worker that becomes his program, its environment, signals, pipes and exit status.
    It is for what a run does and says; of how processes start, and what is left of them, it can tell nothing.
    """
    status, out, err = run_ranks(
        _hocket, 1, words, str(cwd), dict(os.environ if env is None else env), backend=None, timeout_s=timeout_s
    )[0]
    return subprocess.CompletedProcess(words, status, out, err)


def _hocket(words: tuple[str, ...], cwd: str, env: dict[str, str]) -> tuple[int, str, str]:
    from hocket.cli import main

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["hocket", *words]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        tempfile.tempdir = None  # it is anew that of the environment
        _speak_into(out.fileno(), err.fileno())
        with mock.patch("hocket.launch._local._start", _Fork):
            status = _status(main, words)
        return status, *(os.pread(file.fileno(), 1 << 24, 0).decode() for file in (out, err))


def _speak_into(out: int, err: int) -> None:
    for number, name, target in ((1, "stdout", out), (2, "stderr", err)):
        getattr(sys, name).flush()
        os.dup2(target, number)
        setattr(sys, name, io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True))


def _status(call: Callable[..., Any], *arguments: Any) -> int:
    """Call it as the main program; the exit status that Python would have."""
    try:
        call(*arguments)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


class _Fork:
    """What a launcher needs of a `Popen`: `python ... -u WORKER ...` as a fork of this process, in its own session."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], paths: Sequence[str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._be(command[command.index("-u") + 1 :], environment, paths)
            finally:
                os._exit(70)

    @staticmethod
    def _be(command: Sequence[str], environment: Mapping[str, str], paths: Sequence[str]) -> NoReturn:
        os.setsid()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        atexit._clear()  # what the launcher does at its end is not for the rank
        os.environ.update(environment)
        sys.argv = list(command)
        sys.path.insert(0, str(Path(command[0]).parent))
        _speak_into(*(os.open(path, os.O_WRONLY | os.O_TRUNC) if path else 1 + k for k, path in enumerate(paths)))
        os.closerange(3, 1024)
        status = _status(
            runpy._run_code, compile(Path(command[0]).read_bytes(), command[0], "exec"), {}, None, "__main__"
        )
        threading._shutdown()
        atexit._run_exitfuncs()
        os._exit(status)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        end_s = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


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
