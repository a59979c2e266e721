import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from hocket.cli import main
from hocket.comm import OperationRecord
from hocket.explain import PredictedStep, explain, report
from hocket.profile._layout import PHASE, SAMPLE, STEP
from hocket.profile._record import RankRecord
from hocket.timeline import read_perfetto

STEPS = 40


def recorded(
    folder: Path,
    ranks: int,
    late: int,
    more_s: float = 0.03,
    steps: int = STEPS,
    notes: dict[str, object] | None = None,
) -> None:
    """Write the records of a run that never was: steps of 10 ms and an all-reduce, one rank later than the others."""
    random, zero_s = np.random.default_rng(0), time.perf_counter()
    for rank in range(ranks):
        record = RankRecord(folder, rank, ranks)
        for name, value in (notes or {}).items():
            record.text({"note": name, "value": value})
        begin_s = zero_s
        for step in range(steps):
            own_s = 0.01 + (more_s if rank == late else 0.0) + float(random.uniform(0, 0.001))
            arrived_s = begin_s + 0.011 + more_s
            at_s = begin_s + own_s
            op = OperationRecord(
                "0", step + 1, "all_reduce", 1 << 20, "float32", ranks, "shm-direct", False, at_s, at_s, arrived_s,
                arrived_s + 0.002, None, at_s,
            )  # fmt: skip
            record.operation_started(op)
            record.operation_finished(op)
            record.operation_waited(op, at_s, arrived_s + 0.002)
            record.span(PHASE, begin_s, begin_s + 0.001, "data")
            record.span(STEP, begin_s, arrived_s + 0.003, seq=step + 1)
            record.row(1, SAMPLE, nbytes=(200 + rank) << 20, times=(begin_s, 0.0, 0.0, 0.0, 0.0))
            begin_s = arrived_s + 0.003
        record.ended()


class Page(HTMLParser):
    """What a page refers to, and whether its elements are closed in order."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for key, value in attrs if key in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 300])
def test_a_page_tells_of_few_ranks_and_of_many_without_the_network(tmp_path: Path, ranks: int) -> None:
    recorded(tmp_path, ranks, late=ranks - 1, steps=STEPS if ranks == 2 else 12)
    found = explain(tmp_path)
    assert (found.verdicts[0].kind, found.verdicts[0].ranks) == ("straggler", (ranks - 1,))
    text = report(found, found)
    page = Page(text)
    assert page.open == []
    assert page.addresses == ["data:,"], "nothing is fetched"
    assert "http" not in text
    assert len(text) < 5_000_000
    assert f"rank {ranks - 1} of {ranks}" in text
    for title in (
        "Verdicts",
        "Where a step",
        "Every rank",
        "Collectives by size",
        "Memory",
        "Environment",
        "Beside the",
    ):
        assert f"<h2>{title}" in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))  # type: ignore[union-attr]
    assert (data["heat"]["ranks"], data["heat"]["rows"]) == (ranks, ranks if ranks == 2 else 150)
    assert len(data["timeline"]["rows"]) == min(ranks, 24)
    assert f"rank {ranks - 1}" in [row["name"] for row in data["timeline"]["rows"]]


def test_the_command_writes_the_page_and_one_trace_of_all_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path / "runs" / "first", 3, late=1)
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    monkeypatch.chdir(tmp_path)  # the newest run below runs/
    with pytest.raises(SystemExit) as ended:
        main(["report", "-o", str(page), "--trace", str(trace)])
    assert ended.value.code == 0
    assert "rank 1 of 3" in capsys.readouterr().out
    assert "<h2>Verdicts</h2>" in page.read_text()
    timeline = read_perfetto(trace)
    assert timeline.ranks == (0, 1, 2)
    for rank in range(3):
        operations = timeline.of(rank, "collective")
        assert len(operations) == STEPS
        assert sum(one.nbytes or 0.0 for one in operations) == STEPS * 2**20
    # No operation ends on any rank before the last one has begun it.
    late = timeline.of(1, "collective")
    assert all(one.end_s >= last.start_s for one, last in zip(timeline.of(0, "collective"), late, strict=True))


def test_a_text_of_the_run_cannot_become_part_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_HOST", "</script><script>alert(1)</script>")
    recorded(tmp_path, 2, late=1)
    assert "<script>alert" not in report(explain(tmp_path))


def test_steps_of_seconds_are_told_without_powers_of_ten() -> None:
    step = PredictedStep((("computation", 1.2, 1.9996),), (0.9996, 1.4), (), (), "", 8)
    assert step.brief() == [
        "a step took 2000 ms, 1200 predicted (1000 to 1400 with 80%);",
        "  in ms, predicted in brackets: computation 2000 (1200)",
    ]


def test_predicted_stands_beside_measured_and_both_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.profile._record.known_group", lambda name: (name, (0, 1, 2, 3)))
    planned = {"step_s": 0.012, "compute_s": 0.01, "gradients_s": 0.002}
    notes = {"plan": {"name": "4 data", "axes": [["pipeline", 1], ["data", 4], ["tensor", 1]], "predicted": planned}}
    recorded(tmp_path, 4, late=1, notes=notes)
    found = explain(tmp_path)
    assert found.parts is not None
    assert found.predicted is not None
    # 10.1 ms of work, 2 ms of communication and 1 ms behind it; the late rank's 30 ms are a disturbance.
    rows = {name: (a, b) for name, a, b in found.predicted.rows}
    assert found.predicted.step_s == pytest.approx(0.0133, rel=0.05)
    assert found.predicted.measured_s == pytest.approx(found.parts.step_s, rel=1e-9)
    assert rows["waiting for late ranks"][0] < 0.001 < 0.02 < rows["waiting for late ranks"][1]
    assert rows["communication in the whole group"] == (pytest.approx(0.002, rel=0.4), pytest.approx(0.0023, rel=0.2))
    assert found.predicted.planned[0] == ("a step", 0.012, pytest.approx(found.parts.step_s))
    low_s, high_s = found.predicted.interval_s
    assert low_s < found.predicted.step_s < high_s
    more, faster, inside = found.predicted.what_ifs
    assert (more.what, inside.step_s != inside.step_s) == ("8 more workers", True)
    # From the last rank's coming on an all-reduce takes 2 to 3 ms, 2.5 in the mean: half is saved; with 12 ranks it
    # takes (11/12)/(3/4) times as long, and the slowest of 12 is later than that of 4.
    assert found.parts.step_s - faster.step_s == pytest.approx(0.00125, rel=0.1)
    assert 0.0025 * (11 / 12 / 0.75 - 1) * 0.9 < more.step_s - found.parts.step_s < 0.0015
    assert more.throughput == pytest.approx(3 * found.parts.step_s / more.step_s)
    assert all(one.interval_s[0] < one.step_s < one.interval_s[1] for one in (more, faster))
    waterfall = found.parts.waterfall()
    assert sum(seconds for _, seconds in waterfall) == pytest.approx(found.parts.step_s, rel=1e-9)
    assert dict(waterfall)["one rank alone"] == pytest.approx(0.0102, rel=0.05)
    text = "\n".join(found.lines())
    assert "plan: 4 data" in text
    assert "the plan predicted before the run" in text
    page = report(found)
    assert "<h2>Predicted beside measured" in page
    assert "8 more workers" in page


def test_the_waterfall_begins_with_what_the_program_measured_of_one_rank_alone(tmp_path: Path) -> None:
    recorded(tmp_path, 2, late=1, notes={"alone_step_s": 0.005})
    parts = explain(tmp_path).parts
    assert parts is not None
    rows = parts.waterfall()
    assert rows[0] == ("one rank alone", pytest.approx(0.004))  # less 1 ms of loading, which has its own row
    assert sum(seconds for _, seconds in rows) == pytest.approx(parts.step_s, rel=1e-9)
