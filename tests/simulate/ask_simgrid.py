"""Asks SimGrid, if it is there: it belongs to another interpreter (Debian's `python3-simgrid`)."""

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hocket.testing import deadline

PYTHON = "/usr/bin/python3"
RUNNER = Path(__file__).with_name("simgrid_runner.py")

# One cable is one direction here, and no acknowledgements; what is left of CM02 is the sharing by latency.
CM02 = [
    "network/model:CM02",
    "network/crosstraffic:0",
    "network/TCP-gamma:0",
    "maxmin/precision:1e-9",
    "surf/precision:1e-12",
]


@functools.cache
def missing() -> str:
    """Why SimGrid cannot be asked, or an empty string."""
    if not Path(PYTHON).exists():
        return f"there is no {PYTHON}"
    done = subprocess.run(
        [PYTHON, "-c", "import simgrid"], capture_output=True, text=True, timeout=deadline(60), check=False
    )
    return "" if done.returncode == 0 else f"{PYTHON} cannot import simgrid; install Debian's python3-simgrid"


def run(settings: list[str], cases: list[dict[str, Any]]) -> dict[str, Any]:
    """What SimGrid says of the cases; the test is skipped where it is not installed."""
    if missing():
        pytest.skip(missing())
    asked = json.dumps({"settings": settings, "cases": cases})
    done = subprocess.run(
        [PYTHON, str(RUNNER)], input=asked, capture_output=True, text=True, timeout=deadline(110), check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return answer
