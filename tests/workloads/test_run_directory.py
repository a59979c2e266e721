import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hocket.testing import deadline
from hocket.workloads import RunDirectory, conclude
from hocket.workloads._run import METRICS, RESULT, Tail


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", {"workload": "edsr", "settings": {"steps": 9}})


def test_what_is_written_is_read(run: RunDirectory) -> None:
    run.metric(step=1, loss=0.5)
    run.metric(step=2, loss=0.25)
    run.event("started", workers=2)
    assert run.metrics() == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    (event,) = run.events()
    assert event["event"] == "started"
    assert abs(event["time_s"] - time.time()) < deadline(60)
    assert run.config["settings"]["steps"] == 9
    assert run.result() is None


def test_a_run_is_not_overwritten(run: RunDirectory) -> None:
    with pytest.raises(FileExistsError, match="already holds a run"):
        RunDirectory.create(run.path, {})


def test_numbers_that_json_lacks_become_null(run: RunDirectory) -> None:
    run.metric(loss=math.nan, rates=[math.inf, 1.0])
    assert (run.path / METRICS).read_text() == '{"loss": null, "rates": [null, 1.0]}\n'


def test_a_torn_line_hides_no_other(run: RunDirectory) -> None:
    run.metric(step=1)
    with (run.path / METRICS).open("a") as file:
        file.write('{"step": 2, "lo')
    assert run.metrics() == [{"step": 1}]
    run.metric(step=3)  # goes on in the torn line, and is lost with it
    run.metric(step=4)
    assert run.metrics() == [{"step": 1}, {"step": 4}]


def test_the_tail_gives_each_line_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = Tail(path)
    assert tail.new() == []
    path.write_text('{"a": 1}\n{"a"')
    assert tail.new() == [{"a": 1}]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert tail.new() == [{"a": 2}]
    assert tail.new() == []


def test_the_result_is_what_the_files_say(run: RunDirectory) -> None:
    run.event("started", workers=2, threads=1)
    run.metric(step=1, samples=16, elapsed_s=1.0, samples_per_s=16.0, loss=0.5)
    run.metric(step=3, samples=48, elapsed_s=2.0, samples_per_s=32.0, loss=0.4)
    interrupted = conclude(run, "interrupted")
    assert interrupted == run.result()
    assert interrupted["status"] == "interrupted"
    assert interrupted["placement"] == {"workers": 2, "threads": 1}
    assert interrupted["training"]["steps"] == 3
    assert "quality" not in interrupted

    run.event("trained", steps=9, samples=144)
    run.event("evaluated", rows=[])
    finished = conclude(run, "finished")
    assert finished["training"] == {"steps": 9, "samples": 144}
    assert finished["quality"] == {"rows": []}
    assert [file.name for file in run.path.iterdir() if file.name.startswith(".")] == []


_WRITER = """
import sys
from pathlib import Path
from hocket.workloads import RunDirectory
run = RunDirectory(Path(sys.argv[1]))
step = 0
while True:
    step += 1
    run.metric(step=step, filler="x" * 500)
    run.write("result.json", {"step": step, "filler": ["x"] * 500})
"""


def test_a_killed_writer_leaves_every_file_readable(run: RunDirectory) -> None:
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(run.path)])
    try:
        deadline_s = time.monotonic() + deadline(20)
        while run.result() is None or len(run.metrics()) < 50:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(timeout=deadline(10))
    steps = [record["step"] for record in run.metrics()]
    assert steps == list(range(1, len(steps) + 1))
    assert json.loads((run.path / RESULT).read_text())["step"] in (len(steps) - 1, len(steps))
