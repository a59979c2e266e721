"""`hocket calibrate` measures real ranks, and scripts take what it has kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hocket.cli import _application, calibrate
from hocket.testing import deadline, run_ranks

SCRIPT = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x):
        return torch.relu(self.layer(x))

def build():
    return torch.nn.Sequential(Block(), Block()), torch.randn(16, 16)

if __name__ == "__main__":
    import hocket

    model, x = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hocket.Trainer(model, torch.nn.functional.mse_loss, optimizer, plan="auto", sample=x)
"""


def hocket(*words: str, cwd: Path) -> str:
    env = {**os.environ, "XDG_CACHE_HOME": str(cwd / "cache"), "HOCKET_CALIBRATION": "keep", "HOCKET_RECORD": "off"}
    command = [sys.executable, "-m", "hocket", *words]
    ended = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=deadline(120))
    assert ended.returncode == 0, ended.stderr
    if "--json" in words:
        assert json.loads(ended.stdout)["plan"]["predicted"]["step_s"] > 0
    return ended.stdout + ended.stderr


@pytest.mark.long
def test_a_script_takes_what_was_measured_in_few_seconds(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    said = hocket(
        "calibrate",
        "train.py:build",
        "-n",
        "2",
        "--optimizer",
        "SGD",
        "--seconds",
        "1",
        "-o",
        "plan.toml",
        "--json",
        cwd=tmp_path,
    )
    assert "measuring the model and 2 ranks, for about 1 s" in said
    assert all(f"{part} of 4" in said for part in (1, 2, 3, 4))
    plan = (tmp_path / "plan.toml").read_text()
    assert "[predicted]" in plan
    # The script's classes are those of __main__, and its ranks have the same threads.
    assert "what was measured before is taken" in hocket("run", "-n", "2", "train.py", cwd=tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train.py:build", "--optimizer", "Adamw"), "torch.optim has no 'Adamw'"),
        (("nosuch.py:build",), "nosuch.py:build: there is no file 'nosuch.py'"),
        (("edsr",), "'edsr' names no function; write train.py:build"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_ranks_start(words: tuple[str, ...], said: str) -> None:
    ended = CliRunner().invoke(_application("calibrate"), ["calibrate", *words])
    assert ended.exit_code == 2
    assert said in ended.output


def test_a_function_that_builds_no_model_is_one_error_of_a_rank(hocket_forked: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def build(): return 3")
    ended = hocket_forked("calibrate", "train.py:build", "-n", "2", "--optimizer", "SGD", cwd=tmp_path)
    assert ended.returncode == 2
    assert "build() must return (model, sample)" in ended.stderr
    assert "Traceback" not in ended.stderr


REFUSED_IN = """
import os
import torch

def build():
    if os.environ["RANK"] in "{ranks}":
        raise ValueError("no data")
    return torch.nn.Linear(4, 4), torch.randn(8, 4)
"""


def test_a_rank_that_is_refused_says_so_at_once_and_once(hocket_forked: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(REFUSED_IN.format(ranks="01"))
    ended = hocket_forked("calibrate", "train.py:build", "-n", "2", "--optimizer", "SGD", cwd=tmp_path, timeout_s=25)
    assert ended.returncode == 2
    assert ended.stderr.count("ValueError: no data") == 1, ended.stderr
    assert "Traceback" not in ended.stderr


def refused(folder: str) -> None:
    os.chdir(folder)
    os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    calibrate._rank("train.py:build", "SGD", None, None)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_is_refused_says_so_while_the_other_waits(tmp_path: Path, rank: int) -> None:
    (tmp_path / "train.py").write_text(REFUSED_IN.format(ranks=rank))
    run_ranks(refused, 2, str(tmp_path), backend=None, expect_death={rank}, allow_late={1 - rank})
    said = (tmp_path / "said").read_text()
    assert said.count("hocket calibrate: ") == said.count("ValueError: no data") == 1, said
    assert "Traceback" not in said
