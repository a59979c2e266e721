"""Jobs started as a user starts them, and ways to see that nothing of them is left."""

import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.launch import LaunchResult, _sweep, launch

Script = Callable[[str], str]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory for the launcher of this test alone; nothing may be left in it, and no process."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setenv("HOCKET_TEST", str(tmp_path))
    for variable in ("OMP_NUM_THREADS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    yield directory
    assert list(directory.iterdir()) == []
    assert processes_of(tmp_path) == []


def processes_of(test: Path) -> list[int]:
    """The processes that a test has started, however they were started, and that still run."""
    found = []
    mark = f"HOCKET_TEST={test}".encode()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and _sweep.start_ticks(int(name)) is not None:
            try:
                environment = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if mark in environment.split(b"\0"):
                found.append(int(name))
    return found


def until(condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """Wait until something is so."""
    end_s = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.01)
    return value


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write a script; its path."""

    def write(source: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.write_text(source)
        return str(path)

    return write


class Ran:
    """A launch in this process, with what it printed."""

    def __init__(self, *command: str, n: int = 2, **settings: Any) -> None:
        out, err = io.BytesIO(), io.BytesIO()
        self.result: LaunchResult = launch(command, n, stdout=out, stderr=err, **settings)
        self.out = out.getvalue().decode()
        self.err = err.getvalue().decode()
        print(self.out, self.err)

    def lines(self, rank: int) -> list[str]:
        """What a rank printed on stdout."""
        prefix = f"[{rank}] "
        return [line.removeprefix(prefix) for line in self.out.splitlines() if line.startswith(prefix)]


@pytest.fixture
def hocket() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start the command `hocket` as a process of its own; it is killed at the test's end."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **settings: Any) -> "subprocess.Popen[str]":
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **settings}
        process = subprocess.Popen([sys.executable, "-m", "hocket", *arguments], **settings)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=60)


@pytest.fixture
def launched() -> type[Ran]:
    """A launch in this process."""
    return Ran


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    """Wait until something is so."""
    return until


@pytest.fixture
def running(tmp_path: Path) -> Callable[[], list[int]]:
    """The processes of this test that run."""
    return lambda: processes_of(tmp_path)
