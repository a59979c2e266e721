"""`hocket train` as a user meets it: real processes, their output, their exit codes, their files."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hocket.cli import main
from hocket.testing import deadline

_DEADLINE_S = 60
_HOCKET = (sys.executable, "-c", "from hocket.cli import main; main()")
_SMALL = ("--patch", "16", "--batch-size", "4")
_UNENDING = ("train", "cosmoflow", "--size", "tiny", "--steps", "1000000")  # no workload starts sooner


def hocket(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_HOCKET, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=deadline(_DEADLINE_S),
        check=False,
    )


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """A run in a session of its own, as a terminal would have it."""
    return subprocess.Popen(
        [*_HOCKET, *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return what a file's whole lines say; the last one may be in the making."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def wait_for_lines(path: Path, count: int) -> None:
    deadline_s = time.monotonic() + deadline(_DEADLINE_S)
    while len(lines_of(path)) < count:
        assert time.monotonic() < deadline_s, f"{path} has not got {count} lines"
        time.sleep(0.05)


def workers_of(run: Path) -> list[int]:
    """Processes that were started for a run directory."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has ended meanwhile
                continue
            if b"hocket.workloads" in words and str(run).encode() in words:
                found.append(int(process.name))
    return found


def assert_no_worker_left(run: Path, within_s: float) -> None:
    deadline_s = time.monotonic() + deadline(within_s)
    while left := workers_of(run):
        assert time.monotonic() < deadline_s, f"processes {left} are left"
        time.sleep(0.1)


def test_two_workers_train_and_report(hocket_forked: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = hocket_forked("train", "edsr", "-n", "2", "--steps", "6", *_SMALL, "--out", str(run), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "step 6/6" in shown
    for photograph in ("astronaut", "chelsea", "coffee"):
        assert re.search(rf"^ {photograph} +\d\d\.\d\d +\d\d\.\d\d ", done.stdout, re.MULTILINE)
    assert "Scaling efficiency:" in shown
    assert "all_reduce" in shown
    assert "Hidden behind back-propagation:" in shown
    assert {file.name for file in run.iterdir()} == {
        "config.json",
        "events.jsonl",
        "metrics.jsonl",
        "picture.png",
        "record",
        "result.json",
        "trace.json",
    }
    assert json.loads((run / "config.json").read_text())["settings"]["patch"] == 16
    operations = [event for event in lines_of(run / "events.jsonl") if event["event"] == "operation"]
    assert sum(operation["kind"] == "all_reduce" for operation in operations) >= 6
    assert_no_worker_left(run, within_s=0.0)


@pytest.mark.long
def test_json_is_the_only_thing_on_stdout(tmp_path: Path) -> None:
    done = hocket("train", "edsr", "-n", "1", "--steps", "2", *_SMALL, "--json", cwd=tmp_path)
    result = json.loads(done.stdout)
    assert result["status"] == "finished"
    assert result["training"]["samples"] == 8
    assert [row["photograph"] for row in result["quality"]["rows"]] == ["astronaut", "chelsea", "coffee"]
    assert "scaling" not in result  # there is nothing to compare one worker with
    assert re.fullmatch(r"runs/edsr-\d{8}-\d{6}", result["run"])
    explained = result.pop("explained")  # of the record, beside what the run has said of itself
    assert explained["steps"] == 1  # before the first no step has ended
    assert explained["step_s"] > 0.0
    assert json.loads((tmp_path / result["run"] / "result.json").read_text()) == result
    assert "step 2/2" in done.stderr


@pytest.mark.long
def test_resnet50_gives_its_throughput_the_same_way(tmp_path: Path) -> None:
    done = hocket(
        *("train", "resnet50", "--synthetic", "-n", "2", "--steps", "2", "--image-size", "32", "--batch-size", "4"),
        *("--out", "run", "--json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["placement"]["parameters"] == 25_557_032
    assert result["training"]["samples_per_s"] > 0
    assert result["scaling"]["workers"] == 2
    assert "quality" not in result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("alexnet",), "there is no workload 'alexnet'; there are edsr, resnet50, resnet101, "),
        (("edsr", "-n", "0"), "-n 0: there must be at least one worker"),
        (("edsr", "-n", "4", "--batch-size", "3"), "--batch-size 3 is smaller than -n 4"),
        (("edsr", "--scale", "5"), "--scale 5: EDSR magnifies by 2, 3, 4"),
        (("edsr", "--patch", "2000"), "--patch 2000 is larger than a photograph"),
        (("edsr", "--device", "cuda"), "--device cuda: torch"),
        (("resnet50",), "resnet50 comes without photographs; give --synthetic"),
    ],
)
def test_bad_input_is_one_error_and_starts_nothing(
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # asking for a GPU is to be bad input everywhere
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments])
    output, errors = capfd.readouterr()
    assert ended.value.code == 2
    assert output == ""
    assert errors.startswith(f"hocket train: {message}")
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(["train", "edsr", "--out", "run"])
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith("hocket train: run already holds a run")


@pytest.mark.long
def test_ctrl_c_writes_what_is_known(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*_UNENDING, "--out", str(run), cwd=tmp_path)
    try:
        wait_for_lines(run / "metrics.jsonl", 3)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=deadline(30))
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Interrupted" in output
    assert "Traceback" not in output
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "interrupted"
    assert result["training"]["steps"] == lines_of(run / "metrics.jsonl")[-1]["step"] < 1_000_000
    assert_no_worker_left(run, within_s=0.0)


@pytest.mark.long  # launch/test_signals has what becomes of ranks
def test_kill_9_leaves_the_directory_readable_and_no_worker(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*_UNENDING, "--out", str(run), cwd=tmp_path)
    try:
        wait_for_lines(run / "metrics.jsonl", 3)
    finally:
        process.kill()
        process.wait(timeout=deadline(10))
    assert_no_worker_left(run, within_s=10)
    assert lines_of(run / "metrics.jsonl")[-1]["loss"] > 0
    assert lines_of(run / "events.jsonl")[0]["event"] == "started"
    assert json.loads((run / "config.json").read_text())["workload"] == "cosmoflow"


@pytest.mark.long
def test_a_killed_worker_fails_the_run_and_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*_UNENDING, "-n", "2", "--out", str(run), cwd=tmp_path)
    try:
        wait_for_lines(run / "metrics.jsonl", 3)
        os.kill(max(workers_of(run)), signal.SIGKILL)
        output, _ = process.communicate(timeout=deadline(40))
    finally:
        process.kill()
    assert process.returncode == 1
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "failed"
    assert re.search(r"rank [01]: killed by SIGKILL", result["error"])
    assert result["error"] in output
    assert result["training"]["steps"] >= 1
    assert_no_worker_left(run, within_s=0.0)
