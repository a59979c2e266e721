import json
import time
from pathlib import Path

import pytest

from hocket.profile import InGroup, LiveRank, find_hang, live_ranks, short_place, standing, users_frame
from hocket.testing import deadline, run_ranks

from . import hang_programs

COMMON = "train.py:40 (step)"


def _rank(
    rank: int, started: int, finished: int, *, state: str = "blocked", waits_s: float = 0.0, world: int = 8,
    name: str = "dp", where: str = "/home/u/train.py:40 step", members: tuple[int, ...] | None = None,
) -> LiveRank:  # fmt: skip
    group = InGroup(name, members or tuple(range(world)), "all_reduce", 4, started, finished, 100.0)
    return LiveRank(
        rank, world, "b", 1000 + rank, state, (group,), (where,), 0.1, "", 3, None, False, waits_s, 0.0
    )  # fmt: skip


def _waiting(rank: int, **how: object) -> LiveRank:
    return _rank(rank, 1234, 1233, waits_s=9.0, **how)  # type: ignore[arg-type]


def test_a_place_is_the_innermost_of_the_program_also_at_a_scripts_own_level() -> None:
    library = "/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py:125 Linear.forward"
    runpy = "<frozen runpy>:88 _run_code"
    for mine, place in (
        ("/home/u/my models/train.py:7 <module>", "train.py:7"),
        ("/home/u/train.py:9 main.<locals>.step", "train.py:9 (main.<locals>.step)"),
    ):
        assert users_frame([library, mine, runpy]) == mine
        assert short_place(mine) == place
    assert users_frame([library, runpy]) == library
    assert short_place(users_frame([])) == ""


def test_the_sentence_names_rank_operation_and_place():
    ranks = [_waiting(r) for r in range(8)]
    ranks[5] = _rank(5, 1233, 1233, where="/home/u/loader.py:88 next_batch")
    found = find_hang(ranks, 6.0)
    assert found is not None
    assert found.sentence == (
        "rank 5 of 8 (host b) never entered all_reduce #1234 of group dp: it is blocked in loader.py:88 (next_batch), "
        f"while 7 have waited 9 s in {COMMON}"
    )
    assert (found.kind, found.ranks, found.speaker) == ("blocked", (5,), 0)
    assert [group.ranks for group in found.stacks] == [(5,), (0, 1, 2, 3, 4, 6, 7)]


@pytest.mark.parametrize(
    ("state", "word"),
    [("dead", "has died"), ("ended", "has ended"), ("stopped", "is stopped"), ("native", "compiled code"),
     ("running", "computing"), ("silent", "not heard of")],
)  # fmt: skip
def test_what_keeps_the_late_rank_is_told_apart(state, word):
    ranks = [_waiting(0, world=2), _rank(1, 1233, 1233, state=state, world=2)]
    found = find_hang(ranks, 6.0)
    assert found is not None
    assert word in found.sentence
    assert found.ranks == (1,)


def test_a_rank_that_was_stopped_in_the_middle_of_the_operation_is_found():
    found = find_hang([_waiting(0, world=2), _rank(1, 1234, 1233, state="stopped", waits_s=9.0, world=2)], 6.0)
    assert found is not None
    assert (found.kind, found.ranks) == ("stopped", (1,))


def test_who_waits_for_one_that_waits_itself_is_no_cause():
    a = _rank(0, 5, 4, waits_s=9.0, world=3, members=(0, 1))
    b = _rank(1, 7, 6, waits_s=9.0, world=3, name="tp", members=(1, 2))
    c = _rank(2, 6, 6, world=3, name="tp", members=(1, 2))
    found = find_hang([a, b, c], 6.0)
    assert found is not None
    assert found.ranks == (2,)
    assert "keeps the others from all_reduce #5 of group dp" in found.sentence


def test_other_orders_of_operations_are_a_circle_and_all_in_one_operation_is_a_stalled_way():
    one = _rank(0, 5, 4, waits_s=9.0, world=2)
    other = _rank(1, 3, 2, waits_s=9.0, world=2, name="tp")
    found = find_hang([one, other], 6.0)
    assert found is not None
    assert (found.kind, found.ranks) == ("order", (0, 1))
    found = find_hang([_waiting(0, world=2), _waiting(1, world=2)], 6.0)
    assert found is not None
    assert (found.kind, found.ranks) == ("stalled", ())


def test_nothing_is_said_where_the_records_of_other_hosts_cannot_be_seen():
    assert find_hang([_waiting(0), _waiting(1)], 6.0) is None


def test_nobody_who_waits_for_a_short_time_hangs():
    ranks = [_rank(0, 5, 4, waits_s=1.0, world=2), _rank(1, 4, 4, world=2)]
    assert find_hang(ranks, 6.0) is None
    assert "no rank waits" in standing(ranks).sentence


@pytest.mark.parametrize("how", ["blocked", "busy", "native", "stopped", "message"])
def test_the_ranks_that_wait_say_who_keeps_them_and_where(tmp_path: Path, how: str) -> None:
    variables = {"HOCKET_RECORD": str(tmp_path), "HOCKET_HANG_S": "1000"}
    begin_s = time.monotonic()
    run_ranks(hang_programs.keep, 3, how, str(tmp_path), env=variables, timeout_s=deadline(60))
    assert time.monotonic() - begin_s < deadline(40)
    told = [json.loads(line) for line in (tmp_path / "hangs.jsonl").read_text().splitlines()]
    assert len(told) == 1, "one rank speaks, once"
    assert told[0]["kind"] == ("blocked" if how == "message" else how)
    assert told[0]["ranks"] == [1]
    assert "rank 1 of 3" in told[0]["sentence"]
    if how in ("blocked", "busy", "native"):
        assert "hang_programs.py:" in told[0]["sentence"].partition(", while")[0]
    ranks = live_ranks(tmp_path)
    assert [one.rank for one in ranks] == [0, 1, 2]
    assert {one.state for one in ranks} <= {"ended", "dead"}  # as the kit ends ranks


@pytest.mark.long
def test_a_hang_is_told_once_though_a_lower_rank_comes_to_wait_later(tmp_path: Path) -> None:
    variables = {"HOCKET_RECORD": str(tmp_path), "HOCKET_HANG_S": "1000"}
    run_ranks(hang_programs.one_by_one, 3, str(tmp_path), env=variables, timeout_s=deadline(60))
    (told,) = (json.loads(line) for line in (tmp_path / "hangs.jsonl").read_text().splitlines())
    assert (told["kind"], told["ranks"], told["waiting"], told["speaker"]) == ("blocked", [2], [1], 1)


def test_two_orders_of_operations_are_said_to_be_a_circle(tmp_path: Path) -> None:
    variables = {"HOCKET_RECORD": str(tmp_path), "HOCKET_HANG_S": "1000"}
    run_ranks(hang_programs.circle, 2, str(tmp_path), env=variables, timeout_s=deadline(60))
    # One rank may go on a moment before the other, which is then what is said next.
    told = json.loads((tmp_path / "hangs.jsonl").read_text().splitlines()[0])
    assert (told["kind"], told["ranks"]) == ("order", [0, 1])
    assert "group one" in told["sentence"]
    assert "group other" in told["sentence"]
