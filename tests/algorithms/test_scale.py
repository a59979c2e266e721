"""Sizes of real machines: built, verified and bounded in seconds, each in a process of its own to see its memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hocket.testing import deadline

PROGRAM = """
import json, resource, sys
from hocket.algorithms import get
from hocket.schedule import Collective, lower_bounds, needs, verify
from tests.pace import timed

name, world = sys.argv[1], int(sys.argv[2])
schedule, built_s = timed(lambda: get(name)(Collective("all_reduce", world)))
findings, verified_s = timed(lambda: verify(schedule))
used, bound = needs(schedule), lower_bounds(schedule.collective, in_network=bool(schedule.switches))
print(json.dumps({
    "findings": len(findings),
    "took_s": built_s + verified_s,
    "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "moved": float(used.moved / bound.moved),
    "steps": used.steps,
}))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "world", "steps"),
    [
        ("halving_doubling", 65_536, 32),
        ("aggregation_tree", 60_000, 8),
        pytest.param("ring", 4096, 8190, marks=pytest.mark.long),
    ],
)
def test_large_schedules_take_under_ten_seconds_and_four_gigabytes(name: str, world: int, steps: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, str(world)],
        capture_output=True,
        text=True,
        timeout=deadline(100),
        check=True,
    )
    result = json.loads(done.stdout)
    assert result["findings"] == 0
    assert result["moved"] == 1
    assert result["steps"] == steps
    assert result["took_s"] < 10
    assert result["memory"] < 4 * 2**30
