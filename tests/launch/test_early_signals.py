"""Signals that come to `hocket run` before it has started a rank, and while it waits for other hosts."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.comm.rendezvous import own_secret_file
from hocket.launch._facts import free_port
from hocket.testing import deadline

# Python loads it first of all: the command stops for us when it asks for the module that HOCKET_TEST_AT names.
SLOW = """
import os, pathlib, sys, time
here = pathlib.Path(os.environ["HOCKET_TEST"])
class Slow:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == os.environ.get("HOCKET_TEST_AT") and not (here / "there").exists():
            (here / "there").touch()
            while not (here / "go").exists():
                time.sleep(0.01)
sys.meta_path.insert(0, Slow)
"""
TELLS = "import os; print('told', os.path.exists(os.environ['HOCKET_SAVED_FILE'] + '.told'))"


@pytest.fixture(autouse=True)
def minded() -> Iterator[None]:
    """Have processes that are started here mind SIGHUP also where the tests run under nohup, which ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def told(hocket: Any, script: Any, tmp_path: Path, wait_until: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start a job with flags, signal it when it asks for a module, and return its end."""

    def start(module: str, number: int, *flags: str, **settings: Any) -> tuple[int, str, str]:
        script(SLOW, "sitecustomize.py")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
        monkeypatch.setenv("HOCKET_TEST_AT", module)
        process = hocket("run", "-n", "2", *flags, script(TELLS), **settings)
        wait_until((tmp_path / "there").exists)
        process.send_signal(number)
        (tmp_path / "go").touch()
        out, err = process.communicate(timeout=deadline(60))
        return process.returncode, out, err

    return start


@pytest.mark.parametrize("module", ["hocket.cli", "hocket.launch", "hocket.launch._local"])
def test_a_notice_waits_for_the_ranks(told: Any, module: str) -> None:
    status, out, err = told(module, signal.SIGUSR1)
    assert (status, sorted(out.splitlines())) == (0, ["[0] told True", "[1] told True"]), err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_job_is_said_though_it_has_not_begun(told: Any, number: signal.Signals, tmp_path: Path) -> None:
    status, out, err = told("hocket.launch", number, f"--run-dir={tmp_path / 'run'}")
    said = f"hocket: {number.name} before any rank was started, exit status {128 + number}\n"
    assert (status, out, err) == (-number, "", said)
    assert not (tmp_path / "run").exists()


def test_under_nohup_the_terminal_may_go_at_any_moment(told: Any) -> None:
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731 - for preexec_fn
    status, out, err = told("hocket.launch", signal.SIGHUP, preexec_fn=ignore)
    assert (status, sorted(out.splitlines())) == (0, ["[0] told False", "[1] told False"]), err


# The command signals itself once its ranks have ended: before it says so, and while Python ends.
LATE = """
import os, signal, sys
from hocket.launch import _launch
number = signal.Signals[sys.argv.pop(1)]
def last(*given, concluded=_launch._concluded):
    os.kill(os.getpid(), number)
    print("concluded", flush=True)
    return concluded(*given)
class Last:
    def __del__(self):
        os.kill(os.getpid(), number)
_launch._concluded = last
sys.until_the_end = Last()
from hocket.__main__ import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("ends", ["", "raise SystemExit(3)"])
def test_what_comes_once_the_ranks_have_ended_changes_no_status(script: Any, number: signal.Signals, ends: str) -> None:
    command = [sys.executable, script(LATE, "late.py"), number.name, "run", "-n", "2", "--no-run-dir", script(ends)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=deadline(60), check=False)
    assert (ran.returncode, ran.stdout) == (3 if ends else 0, "concluded\n"), ran.stderr


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_launcher_that_waits_for_other_hosts_says_what_ended_it(
    hocket: Any, script: Any, temporary: Path, wait_until: Any, number: signal.Signals
) -> None:
    own_secret_file()
    flags = ("--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    process = hocket("run", "-n", "1", *flags, script(""))
    wait_until(lambda: list(temporary.glob("hocket-job-*/secret")))
    process.send_signal(number)
    _, err = process.communicate(timeout=deadline(60))
    assert process.returncode == 128 + number
    assert f"s, exit status {128 + number}\n" in err
    assert "hocket: interrupted after" in err
