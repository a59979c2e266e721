"""The rows of operations and of waiting: what is written in one row is read as two."""

import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.comm import OperationRecord
from hocket.explain import explain
from hocket.profile import OPERATION, WAIT, _record, read_run, watch
from hocket.profile import _layout as lay
from hocket.profile._live import live_ranks
from hocket.profile._record import RankRecord
from hocket.testing import deadline, run_ranks

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("all_reduce", "broadcast", "barrier")),
        st.integers(0, 1 << 40),
        st.sampled_from(("inline", "beside", "never waited for")),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=40)
@given(OPERATIONS)
def test_every_wait_has_a_row_whether_it_was_written_as_one_or_not(operations: list[tuple[str, int, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        record = RankRecord(Path(folder), 0, 2)
        expected = []
        for seq, (kind, nbytes, how) in enumerate(operations, 1):
            at_s = float(seq)
            op = OperationRecord(
                "0", seq, kind, nbytes, "float32", 2, "shm-direct", how != "inline", at_s, at_s + 0.1, at_s + 0.3,
                at_s + 0.4, None, at_s + 0.2, how == "inline",
            )  # fmt: skip
            record.operation_started(op)
            record.operation_finished(op)
            expected.append((OPERATION, seq, nbytes, at_s, at_s + 0.4))
            if how == "inline":
                expected.append((WAIT, seq, nbytes, at_s, at_s + 0.4))
            elif how == "beside":
                record.operation_waited(op, at_s + 0.1, at_s + 0.45)
                expected.append((WAIT, seq, nbytes, at_s + 0.1, at_s + 0.45))
        rows = read_run(folder).ranks[0].operations
    found = rows[["type", "seq", "nbytes"]].tolist()
    assert found == [one[:3] for one in expected]
    # The clock of a run begins with its first row.
    if expected:
        times = [
            (row["posted_s"] - rows["posted_s"][0] + 1.0, row["finished_s"] - rows["posted_s"][0] + 1.0) for row in rows
        ]
        assert times == [pytest.approx(one[3:]) for one in expected]
    waits = rows[rows["type"] == WAIT]
    assert not waits["flags"].any(), "none was for a message"
    for name in ("started_s", "published_s", "arrived_s"):
        assert (waits[name] == waits["posted_s"]).all()


def test_a_failed_operation_that_was_waited_for_has_the_row_of_its_wait(tmp_path: Path) -> None:
    record = RankRecord(tmp_path, 0, 2)
    op = OperationRecord("0", 1, "all_reduce", 4, "float32", 2, "", False, 1.0, 1.1, inline=True)
    record.operation_started(op)
    record.operation_waited(op, 1.0, 3.0)
    rows = read_run(tmp_path).ranks[0].operations
    assert rows["type"].tolist() == [WAIT]
    assert rows["finished_s"][0] - rows["posted_s"][0] == pytest.approx(2.0)


def test_a_record_of_another_form_is_refused(tmp_path: Path) -> None:
    RankRecord(tmp_path, 0, 1)
    file = tmp_path / lay.FILE.format(0)
    file.write_bytes(b"HOCKREC2" + file.read_bytes()[8:])
    with pytest.raises(ValueError, match="of another version of hocket"):
        read_run(tmp_path)


def test_a_row_whose_text_is_not_there_is_left_out(tmp_path: Path) -> None:
    """As where a disk has damaged the file."""
    record = RankRecord(tmp_path, 0, 1)
    record.span(lay.PHASE, 1.0, 2.0, "evaluation")
    file = tmp_path / lay.FILE.format(0)
    whole = file.read_bytes()
    assert list(read_run(tmp_path).ranks[0].phases()) == ["evaluation"]
    end = whole.index(b'"evaluation"') - 2
    file.write_bytes(whole[: lay.TEXTS_AT] + (end - lay.TEXTS_FROM).to_bytes(8, "little") + whole[lay.TEXTS_AT + 8 :])
    assert list(read_run(tmp_path).ranks[0].phases()) == []


def test_a_record_whose_texts_are_damaged_is_left_out(tmp_path: Path) -> None:
    RankRecord(tmp_path, 0, 2)
    RankRecord(tmp_path, 1, 2)
    file = tmp_path / lay.FILE.format(0)
    whole = file.read_bytes()
    file.write_bytes(whole[: lay.TEXTS_FROM + 4] + b"\0" + whole[lay.TEXTS_FROM + 5 :])
    assert [one.rank for one in read_run(tmp_path).ranks] == [1]
    file.write_bytes(b"\x7f" * len(whole))  # it is no job that began later, and has more ranks
    assert [one.rank for one in read_run(tmp_path).ranks] == [1]
    assert [one.rank for one in live_ranks(tmp_path)] == [1]


def program(folder: str) -> None:
    """One operation that the caller carries out, and one that it waits for later."""
    watch(folder=folder)
    dist.all_reduce(torch.ones(10))
    work = dist.all_reduce(torch.ones(20), async_op=True)
    assert work is not None
    work.wait()


def test_operations_of_a_real_group_are_waited_for_once_each(tmp_path: Path) -> None:
    run_ranks(program, 2, str(tmp_path), timeout_s=60)
    for one in read_run(tmp_path).ranks:
        operations, waits = one.of(OPERATION), one.of(WAIT)
        assert {40, 80} <= set(operations["nbytes"].tolist())
        (inline,) = waits[waits["nbytes"] == 40]
        (own,) = operations[operations["nbytes"] == 40]
        assert (inline["posted_s"], inline["finished_s"]) == (own["posted_s"], own["finished_s"])
        assert len(waits[waits["nbytes"] == 80]) <= 1, "the operation may have been over before"


def test_records_of_an_earlier_job_with_more_ranks_are_left_out(tmp_path: Path) -> None:
    for world, ranks in ((4, range(4)), (2, range(2))):
        for rank in ranks:
            RankRecord(tmp_path, rank, world)
    assert [(one.rank, one.world) for one in read_run(tmp_path).ranks] == [(0, 2), (1, 2)]
    assert [(one.rank, one.world) for one in live_ranks(tmp_path)] == [(0, 2), (1, 2)]


def test_whether_ranks_of_other_hosts_live_and_wait_is_told_whatever_their_calendars_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_record, "boot_of_this_host", lambda: "another")
    now_s, records = time.time(), []
    for rank, ahead_s in enumerate((0.0, -7200.0, 7200.0, -7200.0, 7200.0)):  # the last two are gone
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", partial(sum, (now_s, ahead_s)))
            records.append(RankRecord(tmp_path, rank, 5))
        records[-1].operation_started(
            OperationRecord("0", 1, "all_reduce", 4, "float32", 5, "", False, 1.0, time.perf_counter() - 9.0)
        )
    over = threading.Event()

    def live() -> None:
        while not over.wait(0.1):
            for record in records[:3]:
                record.alive(None, 0.0)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        ranks = live_ranks(tmp_path)
    finally:
        over.set()
        thread.join()
    assert [one.state for one in ranks] == ["blocked"] * 3 + ["silent"] * 2
    assert [one.waits_s for one in ranks[:3]] == pytest.approx([9.0] * 3, abs=deadline(3))


def test_a_rank_says_where_it_is_in_a_file_whose_name_is_not_utf8(tmp_path: Path) -> None:
    record = RankRecord(tmp_path, 0, 1)
    record.alive("entra\udceenement.py:10 (step)", 1.0)
    assert live_ranks(tmp_path)[0].stack == ("entra?nement.py:10 (step)",)


def test_a_record_for_which_there_is_no_space_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        RankRecord(tmp_path, 0, 1)
    assert not list(tmp_path.iterdir())


def test_the_record_that_a_rank_left_of_another_run_is_not_read_with_this_ones(tmp_path: Path) -> None:
    """As where a rank could not record, in a folder that a run of as many ranks has used before."""
    runs = [tmp_path / "before", tmp_path / "now"]
    for folder in runs:
        run_ranks(program, 2, str(folder), timeout_s=deadline(60))
        assert [one.rank for one in read_run(folder).ranks] == [0, 1]
        assert not any("nothing is known" in one for one in explain(folder).remarks)
    other = runs[0] / lay.FILE.format(1)
    other.replace(runs[1] / other.name)
    run = read_run(runs[1])
    assert ([one.rank for one in run.ranks], run.others) == ([0], (1,))
    assert [one.rank for one in live_ranks(runs[1])] == [0]
    assert explain(runs[1]).remarks[0] == (
        "nothing is known of 1 of 2 ranks (1): what the folder has of them is of another run, which began before"
    )


def recorded(folder: str) -> None:
    """A rank that HOCKET_RECORD has record from the beginning of the group, in two groups of all ranks."""
    dist.new_group([0])
    dist.all_reduce(torch.ones(10))


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_of_a_run_name_it_alike(tmp_path: Path, rank: int) -> None:
    names = []
    for turn in ("before", "now"):
        folder = tmp_path / turn
        run_ranks(recorded, 2, str(folder), env={"HOCKET_RECORD": str(folder)}, timeout_s=deadline(60))
        (name,) = {
            (folder / lay.FILE.format(one)).read_bytes()[lay.RUN_AT : lay.RUN_AT + lay.RUN_NBYTES] for one in (0, 1)
        }
        names.append(name)
    assert len({*names, bytes(lay.RUN_NBYTES)}) == 3
    (tmp_path / "before" / lay.FILE.format(rank)).replace(tmp_path / "now" / lay.FILE.format(rank))
    assert read_run(tmp_path / "now").others == (rank,)
