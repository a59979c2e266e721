"""A short run of the faults of `benchmarks/fabric_faults.py`; all hundred are run by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from hocket.testing import deadline

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fabric_faults.py"
KINDS = ("kill_leaf", "stall_aggregator", "flap_link", "garbage_client", "deaf_client", "kill_host")


def test_training_outlives_faults_with_the_same_losses_or_ends_in_time_with_a_name(temporary: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--faults", str(len(KINDS)), "--only", ",".join(KINDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline(300), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"| {kind} | 1 |" in done.stdout for kind in KINDS)
    assert f"{len(KINDS)} faults" in done.stdout
    assert ", 0 bad;" in done.stdout
