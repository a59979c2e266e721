"""`make test` runs few failures once more, alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.testing import deadline

_SUITE = """
import pathlib, pytest

@pytest.mark.parametrize("number", range({count}))
def test_some(number):
    with open(f"runs{{number}}", "a") as runs:
        runs.write("x")
    assert {passes}

@pytest.mark.long
def test_that_is_not_asked_for():
    assert False
"""
_LATER = "pathlib.Path(f'runs{number}').read_text() == 'xx'"
_FLAKY = "flaky: failed beside others, passed alone\n  test_suite.py::test_some[0]\n  test_suite.py::test_some[2]\n"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("count", "passes", "status", "runs", "said"),
    [
        (3, f"number == 1 or {_LATER}", 0, [2, 1, 2], _FLAKY),
        (2, f"number == 1 and {_LATER}", 1, [2, 2], "1 failed, 1 passed"),
        (11, _LATER, 1, [1] * 11, "11 failed"),
        (2, "True", 0, [1, 1], "2 passed"),
    ],
    ids=["flaky", "one is broken", "too many", "none failed"],
)
def test_at_most_ten_failures_run_once_more_and_may_pass(tmp_path, count, passes, status, runs, said):
    (tmp_path / "test_suite.py").write_text(_SUITE.format(count=count, passes=passes))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long\n")
    beside = "-p xdist --numprocesses 1" if said == _FLAKY else "-q"
    command = [sys.executable, Path(__file__).with_name("twice.py"), beside, "-m", "not long"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # pytest starts in a third of the time
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=deadline(60))
    assert done.returncode == status, done.stdout + done.stderr
    assert [len((tmp_path / f"runs{number}").read_text()) for number in range(count)] == runs
    assert said in done.stdout
    assert ("flaky:" in done.stdout) == (said == _FLAKY)
