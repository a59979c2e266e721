"""Who is late where ranks meet."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hocket.launch import _late
from hocket.launch._child import Child
from hocket.launch._late import LateRanks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(_late.time, "monotonic", lambda: now[0])
    return now


def _at(late: LateRanks, clock: list[float], children: Any = ()) -> list[tuple[float, str]]:
    """What is said within 20 minutes, and when."""
    told = []
    for second in range(1200):
        clock[0] = 100.0 + second
        if said := late.look(children):
            told.append((float(second), said))
    return told


def test_late_ranks_are_named_after_a_while_and_less_and_less_often(tmp_path: Path, clock: list[float]) -> None:
    place = f"{tmp_path}/rendezvous-0"
    for rank in (0, 2):
        Path(f"{place}.came-{rank}").touch()
    told = _at(LateRanks(place, 4), clock)
    assert [seconds for seconds, _ in told] == [15, 60, 240, 960]
    assert told[0][1] == (
        "ranks 0, 2 have waited 15 s for ranks 1, 3 to come to hocket.distribute, hocket.Trainer or init_process_group"
    )


@pytest.mark.parametrize("came", [range(0), range(3)], ids=["none", "all"])
def test_nothing_is_said_where_none_has_come_or_all_have(tmp_path: Path, clock: list[float], came: range) -> None:
    for rank in came:
        Path(f"{tmp_path}/rendezvous-0.came-{rank}").touch()
    assert _at(LateRanks(f"{tmp_path}/rendezvous-0", 3), clock) == []


def test_many_ranks_are_counted(tmp_path: Path, clock: list[float]) -> None:
    for rank in range(30):
        Path(f"{tmp_path}/rendezvous-0.came-{rank}").touch()
    _, said = _at(LateRanks(f"{tmp_path}/rendezvous-0", 31), clock)[0]
    assert said.startswith("30 ranks have waited 15 s for rank 30 to come ")


def test_what_a_late_rank_does_is_told(tmp_path: Path, clock: list[float]) -> None:
    Path(f"{tmp_path}/rendezvous-0.came-0").touch()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        _, said = _at(LateRanks(f"{tmp_path}/rendezvous-0", 2), clock, [Child(1, process)])[0]
        os.kill(process.pid, 19)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        _, stopped = _at(LateRanks(f"{tmp_path}/rendezvous-0", 2), clock, [Child(1, process)])[0]
        process.kill()
    assert re.search(rf"init_process_group \(rank 1, process {process.pid}, has computed for \d s so far\)$", said)
    assert stopped.endswith(f"(rank 1, process {process.pid}, is stopped)")


LATE = """
import os, time
import torch
import torch.distributed as dist
if os.environ["RANK"] == "1":
    time.sleep(18)
dist.init_process_group("hocket")
"""


@pytest.mark.long
def test_a_run_says_for_whom_its_ranks_wait(hocket_forked: Any, script: Any, tmp_path: Path) -> None:
    ran = hocket_forked("run", "-n", "2", script(LATE), cwd=tmp_path)
    assert ran.returncode == 0
    said = re.findall(r"hocket: rank 0 has waited 1\d s for rank 1 to come to .* \(rank 1, process ", ran.stderr)
    assert len(said) == 1
