"""Jobs started as a user starts them, and ways to see that nothing of them is left."""

import io
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.launch import LaunchResult, launch
from hocket.testing import deadline

from ..processes import processes_with, until

Script = Callable[[str], str]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory for the launcher of this test alone; nothing may be left in it, and no process."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setenv("HOCKET_TEST", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # where a secret for several hosts is made
    for variable in ("OMP_NUM_THREADS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    yield directory
    assert list(directory.iterdir()) == []
    assert processes_with("HOCKET_TEST", tmp_path) == []


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
        process.communicate(timeout=deadline(60))


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
    return lambda: processes_with("HOCKET_TEST", tmp_path)
