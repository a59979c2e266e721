"""How a run ended, as its launcher has written it beside the record."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hocket.explain import explain
from hocket.explain._ending import ending
from hocket.testing import deadline

STARTED = "2026-11-30T10:00:00+00:00"
BEGAN_S = 1796032800.0


def failure(rank: int, **more: Any) -> dict[str, Any]:
    fields = {
        "rank": rank,
        "exit_code": 1,
        "signal": None,
        "failed_s": BEGAN_S + 12.5,
        "error": None,
        "traceback": None,
    }
    return {**fields, "ended_by_launcher": False, **more}


ERROR = {"error": "ValueError: a bad\nsample", "traceback": "Traceback ..."}
KILLED = {"exit_code": 137, "signal": "SIGKILL"}
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "raised": (
        {"outcome": "failed", "failures": [failure(1, **ERROR), failure(0), failure(2, ended_by_launcher=True)]},
        r"rank 1 of 4 failed with ValueError: a bad, 12.5 s after.*1 more rank failed after it.*run.json has its trace",
    ),
    "killed": (
        {"outcome": "failed", "failures": [failure(3, **KILLED)]},
        r"rank 3 of 4 was killed by SIGKILL, 12.5 s after the start.*lines are in rank-3.err; out of memory shows",
    ),
    "left": (
        {"outcome": "failed", "failures": [failure(0, exit_code=3)]},
        r"rank 0 of 4 ended with status 3, .*rank-0.err$",
    ),
    "another host's": ({"outcome": "failed", "failures": [failure(0, ended_by_launcher=True)]}, None),
    "interrupted": ({"outcome": "interrupted", "exit_code": 143}, r"the job was interrupted \(SIGTERM\) after 201 s"),
    "timed out": ({"outcome": "timed-out", "exit_code": 124}, r"its own time limit after 201 s.*--timeout"),
    "output lost": ({"outcome": "output-lost", "exit_code": 1}, r"no space for what it printed after 201 s"),
    "finished": ({"outcome": "finished", "exit_code": 0}, None),
    "running": ({}, None),
    "of another program": ({"outcome": "failed"}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_launcher_wrote_is_told(case: str, tmp_path: Path) -> None:
    about, expected = CASES[case]
    (tmp_path / "run.json").write_text(json.dumps({"started": STARTED, "wall_s": 201.4, **about}))
    found = ending(tmp_path / "record", 4)
    if expected is None:
        assert found is None
    else:
        assert re.search(expected, str(found), re.DOTALL), str(found)
    assert ending(tmp_path / "elsewhere", 4) is None


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"outcome": "failed", "failures": [{}]}'])
def test_what_cannot_be_read_is_not_known(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    assert ending(tmp_path / "record", 4) is None


PROGRAM = """
import os, sys, time, torch, hocket
trained = torch.nn.Linear(4, 4)
trainer = hocket.Trainer(trained, torch.nn.functional.mse_loss, torch.optim.SGD(trained.parameters(), 0.1))
for n in range(9):
    if n == 5 and os.environ["RANK"] == "1":
        if sys.argv[1:] == ["hang"]:
            time.sleep(100)
        raise ValueError("a bad sample")
    trainer.step((torch.ones(4, 4), torch.ones(4, 4)))
"""


def run(folder: Path, *words: str) -> int:
    """Run the program on two ranks, with these flags and arguments."""
    (folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "hocket", "run", "-n", "2", "--run-dir", "run", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, timeout=deadline(60), check=False).returncode


def test_a_run_that_failed_says_so_first(tmp_path: Path) -> None:
    assert run(tmp_path, "train.py") == 1
    first = explain(tmp_path / "run").verdicts[0]
    assert (first.kind, first.ranks) == ("failed", (1,))
    assert first.sentence.startswith("rank 1 of 2 failed with ValueError: a bad sample")


@pytest.mark.long
def test_a_job_that_stood_when_it_was_ended_names_the_rank_that_others_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.explain._verdicts._STOOD_S", 2.0)
    assert run(tmp_path, "--timeout", str(deadline(12)), "train.py", "hang") == 124
    ended, stood = explain(tmp_path / "run").verdicts[:2]
    assert "was ended by its own time limit" in ended.sentence
    assert re.match(r"the job had made no step for \d+ s, while the others waited for rank 1", stood.sentence)
    assert stood.ranks == (1,)
