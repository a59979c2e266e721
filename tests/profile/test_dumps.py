import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.flight_recorder.fr_trace as fr_trace

from hocket.cli import main
from hocket.comm import OperationRecord
from hocket.explain import explain, report
from hocket.profile import OPERATION, RecordError, read_any, read_run, write_flight_records
from hocket.profile._record import RankRecord

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "barrier",
    "all_to_all",
    "gather",
    "scatter",
    "reduce",
)


def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int = 3, waiting: int = 0) -> None:
    """Write records in which each rank did one operation of every kind; then all but the last rank began one more."""
    monkeypatch.setattr("hocket.profile._record.known_group", lambda name: ("dp", tuple(range(ranks))))
    zero_s = time.perf_counter() - 100.0
    for rank in range(ranks):
        record = RankRecord(folder, rank, ranks)
        for seq, kind in enumerate(KINDS, 1):
            at_s = zero_s + seq + 0.001 * rank
            op = OperationRecord(
                "0", seq, kind, 24 * seq, "float64", ranks, "shm-direct", False, at_s, at_s, at_s,
                zero_s + seq + 0.5, None, at_s,
            )  # fmt: skip
            record.operation_started(op)
            record.operation_finished(op)
        if waiting and rank < ranks - 1:
            record.operation_started(
                OperationRecord(
                    "0", len(KINDS) + 1, "all_reduce", 24, "float64", ranks, "shm-direct", False, at_s + 1.0, at_s + 1.0
                )
            )


def torchs(folder: Path, output: Path) -> Any:
    """Return what torchfrtrace makes of a folder."""
    fr_trace.main([str(folder), "-o", str(output)])
    _, database = pickle.loads(output.read_bytes())
    return database


def test_torchfrtrace_opens_ours_and_matches_every_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "run", monkeypatch)
    write_flight_records(read_run(tmp_path / "run"), tmp_path / "dumps")
    found = torchs(tmp_path / "dumps", tmp_path / "database")
    assert [one.collective_name.partition(":")[2] for one in found.collectives] == list(KINDS)
    assert all(one.pass_check for one in found.collectives)
    assert [(group.desc, group.size) for group in found.groups] == [("dp", 3)]
    # And we read it back: the same operations, bytes and times.
    (again, _), first = read_any(tmp_path / "dumps"), read_run(tmp_path / "run")
    assert again.world == 3
    for one, other in zip(again.ranks, first.ranks, strict=True):
        a, b = one.of(OPERATION), other.of(OPERATION)
        assert [one.texts[int(row["text"])][0] for row in a] == list(KINDS)
        for name in ("seq", "nbytes"):
            assert a[name].tolist() == b[name].tolist()
        assert a["finished_s"] - a["started_s"] == pytest.approx(b["finished_s"] - b["started_s"], abs=1e-5)
        assert one.groups == [("dp", (0, 1, 2))]


def test_the_rank_that_never_came_is_named_by_torch_and_by_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path / "run", monkeypatch, waiting=1)
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "report",
                str(tmp_path / "run"),
                "-o",
                str(tmp_path / "a.html"),
                "--flight-recorder",
                str(tmp_path / "dumps"),
            ]
        )
    assert ended.value.code == 0
    last = torchs(tmp_path / "dumps", tmp_path / "database").collectives[-1]
    assert (last.collective_seq_id, last.missing_ranks) == (len(KINDS) + 1, {2})


def nccls(folder: Path, frames: list[dict[str, str]]) -> None:
    """Write dumps as NCCL's process group does: rank 1 has not called the second all_reduce."""
    for rank in range(3):
        entries = []
        for seq in range(1, 2 if rank == 1 else 3):
            done = seq == 1
            at = 10**18 + seq * 10**9
            entries.append(
                {
                    "frames": frames, "record_id": seq - 1, "pg_id": 0, "process_group": ("0", "default_pg"),
                    "collective_seq_id": seq, "p2p_seq_id": 0, "op_id": seq, "profiling_name": "nccl:all_reduce",
                    "time_created_ns": at, "input_sizes": [[3, 4]], "input_dtypes": ["Float"], "output_sizes": [[3, 4]],
                    "output_dtypes": ["Float"], "state": "completed" if done else "started",
                    "time_discovered_started_ns": at + 1000,
                    "time_discovered_completed_ns": at + 2000 if done else None,
                    "retired": done, "timeout_ms": 600_000, "is_p2p": False,
                }
            )  # fmt: skip
        if rank == 2:  # something later in another group tells how long they have waited
            entries.append(
                {
                    **entries[0],
                    "process_group": ("1", "tp"),
                    "record_id": 2,
                    "time_discovered_completed_ns": 10**18 + 9 * 10**9,
                }
            )
        groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
        groups |= {"1": {"name": "1", "desc": "tp", "ranks": "[2]"}} if rank == 2 else {}
        with (folder / f"nccl_trace_rank_{rank}").open("wb") as file:
            pickle.dump({"version": "2.10", "pg_config": groups, "entries": entries}, file)


def test_a_dump_of_nccls_flight_recorder_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nccls(tmp_path, [{"name": "step", "filename": "/home/me/train.py", "line": "40"}])
    found = explain(tmp_path)
    assert found.hang is not None
    assert (found.hang.kind, found.hang.ranks, found.hang.waiting) == ("recorded", (1,), (0, 2))
    assert "never entered all_reduce #2 of group default_pg: it called its last operation in train.py:40 (step)" in str(
        found.hang
    )
    assert "6 operations of 3 of 3 ranks" in found.lines()[-1]
    assert "all_reduce" in report(found)
    with pytest.raises(SystemExit):
        main(["explain", str(tmp_path)])
    assert "rank 1 of 3" in capsys.readouterr().out


def test_a_dump_can_run_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "touched",)

    (tmp_path / "trace_0").write_bytes(pickle.dumps({"entries": [], "pg_config": {}, "more": Evil()}))
    with pytest.raises(RecordError, match="trace_0.*flight recorder"):
        read_any(tmp_path)
    assert not (tmp_path / "touched").exists()


def test_nccl_inspectors_files_are_read(tmp_path: Path) -> None:
    for rank in range(4):
        lines = []
        for seq in range(1, 6):
            for comm, (n, place) in {"0xaa": (4, rank), "0xbb": (2, rank // 2)}.items():
                if comm == "0xbb" and rank % 2:
                    continue
                ended = 10**15 + seq * 10**4
                lines.append(
                    {
                        "header": {"id": comm, "rank": place, "n_ranks": n, "nnodes": 2},
                        "metadata": {
                            "inspector_output_format_version": "v4.0", "dump_timestamp_us": ended,
                            "hostname": f"h{rank // 2}", "pid": 100 + rank,
                        },
                        "coll_perf": {
                            "coll": "ReduceScatter" if comm == "0xbb" else "AllReduce", "coll_sn": seq,
                            "coll_msg_size_bytes": 2**20, "coll_exec_time_us": 500 + rank, "coll_algobw_gbs": 2.0,
                        },
                    }
                )  # fmt: skip
        text = "\n".join(json.dumps(line, indent=2 if rank == 1 else None) for line in lines)
        (tmp_path / f"h{rank // 2}-pid{100 + rank}.log").write_text(text + '\n{"header": {"id": "torn')
    run, live = read_any(tmp_path)
    assert (run.world, [one.host for one in run.ranks]) == (4, ["h0", "h0", "h1", "h1"])
    assert [len(one.of(OPERATION)) for one in run.ranks] == [10, 5, 10, 5]
    assert run.ranks[0].groups == [("0xaa", (0, 1, 2, 3)), ("0xbb", (0, 2))]
    rows = run.ranks[2].of(OPERATION)
    assert {run.ranks[2].texts[int(row["text"])][0] for row in rows} == {"all_reduce", "reduce_scatter"}
    assert rows["finished_s"] - rows["started_s"] == pytest.approx(502e-6, abs=1e-6)
    assert not any(one.waits_s for one in live)
    assert "<h2>Collectives by size" in report(explain(tmp_path))


def test_a_dump_without_groups_is_read(tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes(pickle.dumps({"version": "2.10", "pg_config": {}, "entries": []}))
    assert "0 operations of 1 of 1 ranks" in explain(tmp_path).lines()[-1]
