"""`hocket tune` measures real ranks, and what it writes is what the backend then uses."""

import json

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from hocket.algorithms import from_toml
from hocket.cli import _application
from hocket.cli.tune import choices_of, table
from hocket.profile import Recorder
from hocket.testing import run_ranks


def tune(*words):
    return CliRunner().invoke(_application("tune"), ["tune", *map(str, words)])


def _path():
    with Recorder() as recorder:
        dist.all_reduce(torch.ones(1024))
    return recorder.paths()


@pytest.mark.long
def test_the_table_is_measured_written_and_used(tmp_path, forked_world):
    result = tune("-n", 3, "--sizes", "4KiB", "--rounds", 1, "-o", tmp_path / "choices.toml", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert {"engine", "ring", "one_shot", "double_tree"} <= {row["algorithm"] for row in rows}
    assert all(row["median_s"] > 0 for row in rows)
    choices = from_toml((tmp_path / "choices.toml").read_text())
    for nbytes in (4096,):
        best = min(
            (r for r in rows if r["nbytes"] == nbytes and r["algorithm"] != "engine"), key=lambda r: r["median_s"]
        )
        pick = choices.pick("all_reduce", 3, nbytes)
        assert str(pick) == best["algorithm"]
        assert pick.origin == "measured"
    env = {"HOCKET_SHARED_MEMORY": "0", "HOCKET_CHOICES": str(tmp_path / "choices.toml")}
    used = choices.pick("all_reduce", 3, 4096).algorithm
    assert run_ranks(_path, 3, env=env) == [{f"gloo {used}": 1}] * 3


def test_over_shared_memory_too(forked_world):
    result = tune("-n", 2, "--sizes", "4KiB", "--rounds", 1, "--transport", "shm", "--collectives", "broadcast,barrier")
    assert result.exit_code == 0, result.output
    assert "broadcast over shm" in result.output
    assert "binomial" in result.output


def test_the_table_for_people_says_how_much_faster_than_the_engine():
    rows = [
        {"collective": "all_reduce", "nbytes": 1024, "algorithm": "engine", "median_s": 4e-4},
        {"collective": "all_reduce", "nbytes": 1024, "algorithm": "ring", "median_s": 2e-4},
        {"collective": "all_reduce", "nbytes": 1024, "algorithm": "one_shot", "median_s": 1e-4},
    ]
    text = table(rows, "gloo")
    assert "gloo's own            400.0 us (1.00x)" in text
    assert "one_shot              100.0 us (4.00x)" in text
    assert choices_of(rows, 4).pick("all_reduce", 4, 1024).algorithm == "one_shot"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--collectives", "all_reduse"), "'all_reduse' is none of all_reduce"),
        (("--collectives", ","), "--collectives: ',' names none"),
        (("--sizes", "1QiB"), "'1QiB' is no size"),
        (("--sizes", "1e9GiB"), "976,562 TiB is too much: the ranks fill 8 vectors"),
        (("--transport", "udp"), "'udp' is neither gloo nor shm"),
        (("-n", "1"), "Invalid value for '-n'"),
        (("-o", "no/such/file"), "'no/such/file' cannot be written"),
    ],
)
def test_bad_input_is_one_error_and_exit_code_2(words, text):
    result = tune(*words)
    assert result.exit_code == 2
    assert text in result.output
