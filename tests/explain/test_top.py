import json
import re
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from hocket._extras import MissingExtraError
from hocket.cli import main
from hocket.comm import OperationRecord
from hocket.explain import explain, prometheus_text, top_lines, write_scalars
from hocket.profile import live_ranks
from hocket.profile._record import RankRecord

from .test_report import recorded


def running(folder: Path) -> list[RankRecord]:
    """Records of two ranks in this process: one waits in an all-reduce, the other one computes."""
    records = [RankRecord(folder, rank, 2) for rank in range(2)]
    for rank, record in enumerate(records):
        record.stepped(7 + rank, 0.02)
        record.alive("/home/me/train.py:12 step", 0.5, 100 << 20)
    now_s = time.perf_counter()
    records[1].operation_started(
        OperationRecord(
            "0", 3, "all_reduce", 64, "float32", 2, "shm-direct", False, now_s, now_s - 9.0, 0.0, 0.0, None, now_s
        )
    )
    return records


def test_the_lines_say_who_waits_for_what_and_how_fast_the_job_is(tmp_path: Path) -> None:
    records = running(tmp_path)
    before = live_ranks(tmp_path)
    for record in records:
        record.stepped(11, 0.025)
    lines = top_lines(live_ranks(tmp_path), before, since_s=2.0, most=1)
    assert lines[0].startswith("2 of 2 ranks on 1 host: 2 running")
    assert lines[1] == "step 11, 1.75 steps a second, 0.20 GiB"  # (4 + 3) / 2 steps in 2 s
    rows = [line for line in lines if re.match(r"[01] ", line)]
    assert len(rows) == 1, "one row was asked for"
    assert rows[0].startswith("0 "), "that of the rank that others wait for"
    assert "train.py:12 (step)" in rows[0]
    assert lines[-1] == "and 1 more"
    assert any("all_reduce #3" in line for line in top_lines(live_ranks(tmp_path)))


def test_the_command_looks_once_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = running(tmp_path)
    for arguments in (["top", str(tmp_path)], ["top", str(tmp_path), "--json"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
    text, _, document = capsys.readouterr().out.partition("[\n")
    assert "all_reduce #3" in text
    assert [one["steps"] for one in json.loads("[" + document)] == [7, 8]
    for record in records:
        record.ended()
    file = tmp_path / "hocket.prom"
    with pytest.raises(SystemExit):
        main(["top", str(tmp_path), "--prometheus", str(file)])
    assert 'hocket_up{rank="1"' in file.read_text()
    with pytest.raises(SystemExit) as ended:
        main(["top", str(tmp_path / "nothing")])
    assert ended.value.code == 2


def test_prometheus_reads_a_line_for_each_rank_and_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_HOST", 'a "b"\\c')
    running(tmp_path)
    lines = prometheus_text(live_ranks(tmp_path)).splitlines()
    assert 'hocket_steps_total{rank="1",host="a \\"b\\"\\\\c"} 8' in lines
    metric = re.compile(r'(# (HELP|TYPE) hocket_\w+ .+|hocket_\w+\{rank="\d+",host="(\\.|[^"\\])*"\} [-+.e\d]+)')
    assert all(metric.fullmatch(line) for line in lines)


def test_tensorboard_gets_a_scalar_for_each_part_of_each_step(tmp_path: Path) -> None:
    recorded(tmp_path / "run", 2, late=1)
    found = explain(tmp_path / "run")
    if find_spec("tensorboard") is None:
        with pytest.raises(MissingExtraError, match=r'pip install "hocket\[tensorboard\]"'):
            write_scalars(found, tmp_path / "board")
        return
    write_scalars(found, tmp_path / "board")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert found.parts is not None
    steps = events.Scalars("seconds/step")
    assert [one.step for one in steps] == list(range(found.parts.first, found.parts.first + found.parts.steps))
    assert sum(one.value for one in steps) / len(steps) == pytest.approx(found.parts.step_s, rel=1e-4)
