"""A short run of the faults of `benchmarks/faults.py`, signals on one host; all are run by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from hocket.testing import deadline

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(deadline(170))
def test_trainings_end_in_time_with_the_culprit_named_and_nothing_left():
    command = [sys.executable, "-m", "benchmarks.faults", "--one-host", "--count", "1", "--seed", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=deadline(150), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 ended well, 1 named the culprit" in done.stdout
