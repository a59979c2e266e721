import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.cli import main
from hocket.comm import OperationRecord
from hocket.explain import Replay, explain, parts_of, report
from hocket.explain._parts import BUBBLE, LATE
from hocket.explain._slow_steps import slow_steps
from hocket.explain._straggler import began
from hocket.profile import RecordError, read_run
from hocket.profile._layout import PHASE, SAMPLE, STEP
from hocket.profile._record import RankRecord
from hocket.testing import deadline, run_ranks

from . import fault_programs

RANKS, FAULTY, STEPS = 3, 2, 60


def trained(folder: Path, fault: str, size: float, steps: int = STEPS) -> None:
    run_ranks(
        fault_programs.train, RANKS, fault, FAULTY, steps, size,
        env={"HOCKET_RECORD": str(folder)}, timeout_s=deadline(90),
    )  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fault", "kind", "word"),
    [
        ("loader", "slow loader", "its data comes late"),
        ("compute", "straggler", "fault_programs.py"),
        ("late compute", "straggler", "since step"),
        ("checkpoint", "checkpoints", "checkpoints take"),
        ("leak", "memory growth", "grows all the time"),
    ],
)
def test_the_fault_is_the_first_verdict(tmp_path: Path, fault: str, kind: str, word: str) -> None:
    trained(tmp_path, fault, 8.0 if fault == "checkpoint" else 4.0, 3 * STEPS if fault == "leak" else STEPS)
    found = explain(tmp_path)
    first = found.verdicts[0]
    assert (first.kind, first.ranks) == (kind, () if fault == "checkpoint" else (FAULTY,))
    assert word in first.sentence
    if fault == "compute":
        assert first.next_step.startswith("look what fault_programs.py")
        assert f"does on rank {FAULTY} alone" in first.next_step
    if fault == "late compute":
        assert first.since_step is not None
        assert abs(first.since_step - STEPS // 2) <= 3
    assert found.parts is not None
    for rows in (found.parts.means(), found.parts.waterfall()):
        assert sum(seconds for _, seconds in rows) == pytest.approx(found.parts.step_s, rel=1e-6), "they add up to it"


def grown(folder: Path, world: int, ranks: Sequence[int], mib: Callable[[int], float]) -> None:
    """Write records of ranks of which some have so many MiB more by step."""
    zero_s = time.perf_counter()
    for rank in range(world):
        record = RankRecord(folder, rank, world)
        for step in range(120):  # of a second; four samples each
            begin_s = zero_s + step
            for quarter in range(4):
                used = 200.0 + (mib(step) if rank in ranks else 0.0)
                record.row(1, SAMPLE, nbytes=int(used * 2**20), times=(begin_s + 0.25 * quarter, 0.0, 0.0, 0.0, 0.0))
            record.span(STEP, begin_s, begin_s + 1.0, seq=step + 1)
        record.ended()


def test_of_many_ranks_the_first_are_named_and_dots_stand_for_the_others(tmp_path: Path) -> None:
    grown(tmp_path, 12, range(1, 11), lambda step: 2.0 * step)
    (told,) = explain(tmp_path).verdicts
    assert told.sentence.startswith("the memory of ranks 1, 2, 3, 4, 5, 6, 7, 8, ... of 12 grows")


@pytest.mark.parametrize(
    ("mib", "leaks", "ranks"),
    [
        (lambda step: 2.0 * step, True, (2,)),
        (lambda step: 2.0 * step, True, (1, 2)),
        (lambda step: 64.0 * (step // 20), True, ()),  # an allocator takes much at once
        (lambda step: 300.0 if step > 60 else 0.0, False, (2,)),  # an evaluation's buffers
        (lambda step: 100.0 * np.log1p(step), False, ()),  # caches
        (lambda step: 200.0 * (step % 7), False, (2,)),
        (lambda step: 0.05 * step, False, ()),
    ],
)
def test_a_leak_grows_with_the_steps_in_a_straight_line(
    tmp_path: Path, mib: Callable[[int], float], leaks: bool, ranks: tuple[int, ...]
) -> None:
    grown(tmp_path, RANKS, ranks or range(RANKS), mib)
    told = [(one.kind, one.ranks) for one in explain(tmp_path).verdicts]
    assert told == ([("memory growth", ranks)] if leaks else [])


@pytest.mark.parametrize("end_s", [None, 0.0, 20.0])  # there is no step yet, or it is still under way
def test_what_a_program_sets_up_until_its_first_step_ends_is_no_leak(tmp_path: Path, end_s: float | None) -> None:
    zero_s = time.perf_counter()
    for rank in range(2):
        record = RankRecord(tmp_path, rank, 2)
        for at in np.arange(0.0, 20.0, 0.25):
            record.row(1, SAMPLE, nbytes=int((200 + 20 * at) * 2**20), times=(zero_s + at, 0.0, 0.0, 0.0, 0.0))
        if end_s is not None:
            record.span(STEP, zero_s, zero_s + end_s, seq=1)
        record.ended()
    assert [one.kind for one in explain(tmp_path).verdicts] == []


@pytest.mark.parametrize(("since", "every"), [(50, 0), (0, 10)])
def test_a_delay_that_comes_and_goes_has_no_beginning(since: int, every: int) -> None:
    at = np.arange(100)
    late = (at >= since) & (not every or (at // every % 2 == 0))
    assert began(np.where(late, 0.01, 0.0)[2:]) == max(0, since - 2)


def test_chance_has_no_beginning() -> None:
    draws = np.random.default_rng(0).normal(0.0, 0.02, (200, 60))
    assert sum(began(one) > 0 for one in draws) <= 2
    at = np.arange(60)
    assert [began(np.where(at >= turn, 0.1, 0.0)) for turn in (54, 55)] == [54, 0], "of five steps nothing is said"


def test_a_rank_without_a_core_is_late_though_its_time_goes_in_operations(tmp_path: Path) -> None:
    """It comes late, and notices 4 ms after the other that all is over; its thread is ready nearly all the while."""
    zero_s = time.perf_counter()
    for rank in range(2):
        record = RankRecord(tmp_path, rank, 2)
        for step in range(40):
            begin_s = zero_s + 0.035 * step
            at_s = begin_s + (0.029 if rank else 0.010)
            over_s = begin_s + (0.035 if rank else 0.031)
            op = OperationRecord(
                "0", step + 1, "all_reduce", 4, "float32", 2, "shm-direct", False, at_s, at_s, begin_s + 0.029,
                over_s, None, at_s,
            )  # fmt: skip
            record.operation_started(op)
            record.operation_finished(op)
            record.operation_waited(op, at_s, over_s)
            record.span(STEP, begin_s, begin_s + 0.035, seq=step + 1)
            times = (begin_s, 0.0, 0.001 * step, (0.03 if rank else 0.001) * step, 0.0)
            record.row(1, SAMPLE, nbytes=1 << 28, times=times)
        record.ended()
    found = explain(tmp_path)
    assert found.parts is not None
    assert found.parts.communication.mean() == pytest.approx(0.002, rel=0.1), "what one rank notices late is no network"
    first = found.verdicts[0]
    assert (first.kind, first.ranks) == ("straggler", (1,))
    assert "other processes take its core" in first.sentence


def recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, work: np.ndarray, data: np.ndarray, hosts: str = ""
) -> None:
    """Write records of ranks that load data and compute, for so many seconds by rank and step, and then reduce."""
    now_s = time.perf_counter()
    records = []
    for rank in range(len(work)):
        monkeypatch.setenv("HOCKET_HOST", hosts[rank] if hosts else "a")
        records.append(RankRecord(folder, rank, len(work)))
    for step, (computes, loads) in enumerate(zip(work.T, data.T, strict=True)):
        at = now_s + loads + computes
        over_s = float(at.max()) + 0.002
        for record, loaded_s, at_s in zip(records, (now_s + loads).tolist(), at.tolist(), strict=True):
            op = OperationRecord(
                "0", step + 1, "all_reduce", 4, "float32", len(work), "shm-direct", False, at_s, at_s, float(at.max()),
                over_s, None, at_s,
            )  # fmt: skip
            record.span(PHASE, now_s, loaded_s, "data")
            record.operation_started(op)
            record.operation_finished(op)
            record.operation_waited(op, at_s, over_s)
            record.span(STEP, now_s, over_s, seq=step + 1)
        now_s = over_s
    for record in records:
        record.ended()


def test_all_ranks_of_a_slow_host_are_late_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = 0.02 * (1 + 0.02 * np.random.default_rng(0).random((8, 60)))
    work[4:] *= 1.5
    recorded(tmp_path, monkeypatch, work, np.zeros_like(work), "aaaabbbb")
    (told,) = explain(tmp_path).verdicts
    assert (told.kind, told.ranks, told.confidence) == ("straggler", (4, 5, 6, 7), "high")
    assert told.sentence.startswith("ranks 4, 5, 6, 7 of 8 (host b) are late: each computes longer")
    assert told.gain == pytest.approx(0.01 / 0.0323, abs=0.02)


def test_ranks_that_are_late_by_different_causes_have_a_sentence_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, data = 0.02 * (1 + 0.02 * np.random.default_rng(0).random((8, 60))), np.zeros((8, 60))
    work[3] += 0.010
    data[5] += 0.011
    recorded(tmp_path, monkeypatch, work, data)
    told = explain(tmp_path).verdicts
    assert {(one.kind, one.ranks) for one in told} == {("straggler", (3,)), ("slow loader", (5,))}
    assert all("without what ranks 3, 5 do more" in one.sentence for one in told)


@pytest.mark.parametrize(("restless", "kinds"), [(2.0, ["uneven work"]), (0.5, [])])
def test_ranks_that_are_late_by_turns_have_uneven_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restless: float, kinds: list[str]
) -> None:
    work = 0.02 * (1 + restless * np.random.default_rng(0).random((8, 60)))
    recorded(tmp_path, monkeypatch, work, np.zeros_like(work))
    found = explain(tmp_path)
    assert [one.kind for one in found.verdicts] == kinds


@pytest.mark.parametrize(
    ("steps", "lost", "said"),
    [
        (60, (), ["nothing stands out: no rank is late, and no part of a step takes more than it should"]),
        (60, (1,), ["nothing is known of 1 of 3 ranks (1): no record", "nothing stands out: no other rank is late"]),
        (3, (), ["who is late, and what takes more than it should, is said of 6 steps or more"]),
    ],
)
def test_nothing_stands_out_is_said_of_what_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, lost: tuple[int, ...], said: list[str]
) -> None:
    work = np.full((3, steps), 0.02)
    recorded(tmp_path, monkeypatch, work, np.zeros_like(work))
    for rank in lost:
        os.truncate(tmp_path / f"rank-{rank:05d}.record", 1000)
    found = explain(tmp_path)
    assert [one.startswith(begin) for one, begin in zip(found.remarks, said, strict=True)] == [True] * len(said)
    assert found.to_json()["remarks"] == found.remarks == found.lines()[: len(said)]
    assert f"steps on {3 - len(lost)} ranks" in found.lines()[len(said)]
    assert said[0][1:] in report(found)


@pytest.mark.parametrize(
    ("late", "steps", "ranks", "which"),
    [
        ((1,), slice(9, None, 10), (1,), "every 10th step takes 4.9 times as long as the others: rank 1 of 3 (h"),
        (
            (1,),
            slice(30, 31),
            (1,),
            "step 31 takes 4.9 times as long as the others: rank 1 of 3 (host a) ",
        ),
        (
            (0, 1, 2),
            slice(19, None, 20),
            (),
            "every 20th step takes 4.9 times as long as the others: all ranks compute",
        ),
        ((1,), slice(2, 5), (1,), "steps 3 to 5 take 4.9 times as long as the others: rank 1 of 3 (host a) "),
        ((1,), slice(30, 32), (1,), "steps 31, 32 take 4.9 times as long as the others: rank 1 of 3 (host a) "),
        ((1,), slice(40, 57, 8), (1,), "steps 41, 49, 57 take 4.9 times as long as the others: rank 1 of 3 (hos"),
    ],
)
def test_a_few_slow_steps_are_told_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: tuple[int, ...], steps: slice, ranks: tuple[int, ...],
    which: str,
) -> None:  # fmt: skip
    work = 0.018 * (1 + 0.02 * np.random.default_rng(0).random((3, 60)))
    for rank in late:
        work[rank, steps] = 0.098
    recorded(tmp_path, monkeypatch, work, np.zeros_like(work))
    (told,) = explain(tmp_path).verdicts
    assert (told.kind, told.ranks) == ("slow steps", ranks)
    assert told.sentence.startswith(which)
    assert told.next_step.startswith("as a rule it comes once") == (steps.start == 2), "the first of all"
    more_s = 0.08 * len(range(60)[steps])
    assert told.gain == pytest.approx(more_s / (0.02 * 58 + more_s), rel=0.1)
    parts = parts_of(read_run(tmp_path))
    assert parts is not None
    staged = tuple({LATE: BUBBLE}.get(name, name) for name in parts.names)  # who waits for a stage is not slow
    assert [one.ranks for one in slow_steps(replace(parts, names=staged))] == [ranks]


def test_slow_steps_whose_ranks_change_and_epochs_that_wait_for_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = 0.018 * (1 + 0.02 * np.random.default_rng(0).random((3, 60)))
    changing, data = work.copy(), np.zeros_like(work)
    changing[[0, 1, 2], [15, 33, 52]] = 0.1
    recorded(tmp_path / "changing", monkeypatch, changing, data)
    (told,) = explain(tmp_path / "changing").verdicts
    assert (
        "steps 16, 34, 53 take 5.0 times as long as the others: now this rank and now that one computes"
        in told.sentence
    )
    data[:, 15::15] = 0.1  # workers of the loader start anew
    recorded(tmp_path / "epochs", monkeypatch, work, data)
    (told,) = explain(tmp_path / "epochs").verdicts
    assert "every 15th step takes 5.9 times as long as the others: all ranks wait for data in them" in told.sentence
    assert told.next_step.startswith("workers that stay from epoch to epoch")


def test_all_ranks_data_is_told_beside_that_of_one_which_is_a_little_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, data = np.full((3, 60), 0.01), np.full((3, 60), 0.03)
    data[1] += 0.004
    recorded(tmp_path, monkeypatch, work, data)
    assert [(one.kind, one.ranks) for one in explain(tmp_path).verdicts] == [
        ("loading data", ()),
        ("slow loader", (1,)),
    ]


@pytest.mark.parametrize(
    ("ranks", "ready_s", "sentence"),
    [
        (
            (0,),
            0.0,
            "rank 0 of 3 (host a) is late: it writes checkpoints, 20.7 ms more in the mean step than the others",
        ),
        ((0,), 0.02, "rank 0 of 3 (host a) is late: it writes checkpoints, 20.7 ms more in the mean step than the "),
        ((0, 1, 2), 0.0, "checkpoints take 29% of the time"),
        ((0, 2), 0.0, "checkpoints take 29% of the time of ranks 0, 2"),
    ],
)
def test_who_writes_checkpoints_alone_is_named_with_what_they_cost_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...], ready_s: float, sentence: str
) -> None:
    monkeypatch.setenv("HOCKET_HOST", "a")
    zero_s, step_s, saves_s = time.perf_counter(), 0.05, 0.2
    for rank in range(3):
        record, at_s = RankRecord(tmp_path, rank, 3), zero_s
        for step in range(60):
            begin_s, saves = at_s, step % 10 == 9
            at_s += step_s + saves_s * saves
            done_s = at_s - 0.002
            if saves and rank in ranks:
                record.span(PHASE, begin_s, begin_s + saves_s, "checkpoint")
            else:
                done_s -= saves_s * saves
            op = OperationRecord(
                "0", step + 1, "all_reduce", 4, "float32", 3, "shm-direct", False, done_s, done_s, at_s - 0.002,
                at_s, None, done_s,
            )  # fmt: skip
            record.operation_started(op)
            record.operation_finished(op)
            record.operation_waited(op, done_s, at_s)
            record.span(STEP, begin_s, at_s, seq=step + 1)
            record.row(1, SAMPLE, nbytes=1 << 28, times=(begin_s, 0.0, (0.048 - ready_s) * step, ready_s * step, 0.0))
        record.ended()
    told = explain(tmp_path).verdicts
    first = told[0]
    assert (first.kind, first.ranks) == ("checkpoints", ranks if len(ranks) < 3 else ())
    assert first.sentence.startswith(sentence)
    assert first.gain == pytest.approx(0.29, abs=0.01), "what all wait for it"
    assert [one.kind for one in told].count("checkpoints") == 1
    if first.evidence.startswith("late"):
        assert first.evidence.startswith("late in 10% of 58 steps; it is 100% checkpoints;")


@pytest.mark.long
def test_what_a_trainer_saves_and_evaluates_is_no_computation(tmp_path: Path) -> None:
    env = {"HOCKET_RECORD": str(tmp_path / "record")}
    run_ranks(fault_programs.save_and_evaluate, 2, str(tmp_path), env=env, timeout_s=deadline(90))
    for rank in read_run(tmp_path / "record").ranks:
        phases = rank.phases()
        for name in ("checkpoint", "evaluation"):
            longest = np.sort(np.diff(phases[name], axis=1).ravel())[-8:]  # `torch.save` alone has shorter ones
            took = np.median(rank.values()[name]["value"])
            assert np.median(longest) == pytest.approx(took, rel=0.3), "all of the calls"


def test_cores_that_emulated_hosts_share_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zero_s = time.perf_counter()
    for rank in range(2):
        monkeypatch.setenv("HOCKET_HOST", f"h{rank}")
        record = RankRecord(tmp_path, rank, 2)
        for step in range(20):
            record.span(STEP, zero_s + 0.3 * step, zero_s + 0.3 * (step + 1), seq=step + 1)
            record.row(1, SAMPLE, nbytes=1 << 28, times=(zero_s + 0.3 * step, 0.0, 0.1 * step, 0.2 * step, 0.0))
        record.ended()
    (told,) = explain(tmp_path).verdicts
    assert (told.kind, told.evidence.split(";")[0]) == (
        "busy machine",
        f"2 ranks, {len(os.sched_getaffinity(0))} cores",
    )


def sampled(
    folder: Path, work: np.ndarray, ready: np.ndarray, blocked: np.ndarray, places: Callable[[int, int, float], str]
) -> None:
    """Write records of ranks that work and reduce, by rank and step; a rank is read each 50 ms, once in a wait, too.

    Of its work it is ready and blocked for so many seconds; `places` gives where it is by rank, step and share of it.
    """
    begin_s = time.perf_counter()
    ends = np.concatenate([[0.0], np.cumsum(work.max(axis=0) + 0.002)])
    for rank in range(len(work)):
        record = RankRecord(folder, rank, len(work))
        ran_s = ready_s = 0.0
        due_s = 0.0
        for step in range(work.shape[1]):
            at_s, came_s, over_s = (begin_s + s for s in (ends[step], ends[step] + work[:, step].max(), ends[step + 1]))
            done_s = at_s + work[rank, step]
            op = OperationRecord(
                "0", step + 1, "all_reduce", 4, "float32", len(work), "shm-direct", False, done_s, done_s, came_s,
                over_s, None, done_s,
            )  # fmt: skip
            record.operation_started(op)
            record.operation_finished(op)
            record.operation_waited(op, done_s, over_s)
            record.span(STEP, at_s, over_s, seq=step + 1)
            runs = work[rank, step] - ready[rank, step] - blocked[rank, step]
            while due_s < ends[step + 1]:
                of_step = min(1.0, (due_s - ends[step]) / work[rank, step])
                numbers = begin_s + due_s, 0.0, ran_s + of_step * runs, ready_s + of_step * ready[rank, step], 0.0
                text = record.text(places(rank, step, of_step) if of_step < 1.0 else "/t.py:1 <module>")
                record.row(1, SAMPLE, text=text, nbytes=1 << 28, times=numbers)
                due_s += 0.05
            ran_s, ready_s = ran_s + runs, ready_s + ready[rank, step]
        record.ended()


@pytest.mark.parametrize(("taken", "word"), [(False, "it computes longer"), (True, "other processes take its core")])
def test_who_computes_longer_on_a_busy_machine_has_its_core(tmp_path: Path, taken: bool, word: str) -> None:
    """All lack cores half of the time; from step 40 on a rank's steps take 20 ms more, by computing or by others."""
    work = np.full((2, 80), 0.04)
    ready = 0.5 * work
    work[1, 40:] += 0.02
    ready[1, 40:] += 0.02 if taken else 0.01
    sampled(
        tmp_path, work, ready, np.zeros_like(work),
        lambda rank, step, share: "/t.py:7 more" if rank and step >= 40 and share > 0.67 else "/t.py:1 <module>",
    )  # fmt: skip
    told = next(one for one in explain(tmp_path).verdicts if one.ranks == (1,))
    assert word in told.sentence
    assert told.since_step == 41
    assert taken or "mostly in t.py:7 (more)" in told.sentence, "not where it is most of the time"


@pytest.mark.parametrize(("lacking", "kinds"), [(0.5, ["busy machine"]), (0.0, ["straggler"])])
def test_a_rank_that_is_late_for_a_few_seconds_of_a_busy_machine_is_not_blamed(
    tmp_path: Path, lacking: float, kinds: list[str]
) -> None:
    work = np.full((2, 80), 0.04)
    work[1, 68:] += 0.03
    sampled(tmp_path, work, lacking * work, np.zeros_like(work), lambda *_: "/t.py:1 <module>")
    assert [one.kind for one in explain(tmp_path).verdicts] == kinds


def test_no_place_is_named_by_chance(tmp_path: Path) -> None:
    work = np.full((2, 60), 0.04)
    work[1] += 0.006
    rng = np.random.default_rng(0)
    sampled(tmp_path, work, np.zeros_like(work), np.zeros_like(work), lambda *_: f"/t.py:{rng.integers(1, 6)} <module>")
    (told,) = explain(tmp_path).verdicts
    assert "it computes longer, 6 ms more" in told.sentence
    assert told.next_step.startswith("look what the program does on rank 1 alone")


@pytest.mark.parametrize(("pauses_s", "told"), [(0.02, True), (0.003, False)])
def test_ranks_that_pause_in_every_step_are_told_where(tmp_path: Path, pauses_s: float, told: bool) -> None:
    work = np.full((2, 80), 0.04)
    sampled(
        tmp_path, work, np.zeros_like(work), np.full_like(work, pauses_s),
        lambda rank, step, share: "/t.py:7 asks" if share < pauses_s / 0.04 else "/t.py:1 f",
    )  # fmt: skip
    found = explain(tmp_path)
    assert [one.kind for one in found.verdicts] == ["pauses"] * told
    if told:
        (one,) = found.verdicts
        assert one.sentence.startswith("ranks pause 48% of their time, when they could compute")
        assert "mostly" not in one.sentence, "half of the time they compute elsewhere"
        assert (one.ranks, one.confidence) == ((), "high")
        assert one.gain == pytest.approx(0.02 / 0.042, rel=0.05)


def test_ranks_that_mostly_pause_are_told_in_which_line(tmp_path: Path) -> None:
    work = np.full((2, 80), 0.04)
    sampled(
        tmp_path, work, np.zeros_like(work), np.full_like(work, 0.03),
        lambda rank, step, share: "/t.py:7 asks" if share < 0.75 else "/t.py:1 f",
    )  # fmt: skip
    found = explain(tmp_path)
    (one,) = found.verdicts
    (first, most), (second, some) = found.places
    assert (first, second) == ("t.py:7 (asks)", "t.py:1 (f)")
    assert (most, some) == (pytest.approx(0.75, abs=0.06), pytest.approx(0.25, abs=0.06))
    assert f"computation, by where ranks were read in it: {first} {most:.0%}, {second} {some:.0%}" in found.lines()
    assert found.to_json()["places"][0] == {"place": first, "share": most}
    assert f"<td>{first}</td><td class=n>{most:.0%}</td>" in report(found)
    assert one.sentence == "ranks pause 71% of their time, when they could compute, mostly in t.py:7 (asks)"


def test_a_main_thread_that_only_waits_for_the_one_that_trains_does_not_pause(tmp_path: Path) -> None:
    work = np.full((2, 80), 0.04)
    sampled(tmp_path, work, np.zeros_like(work), 0.99 * work, lambda *_: "/t.py:1 join")
    assert explain(tmp_path).verdicts == ()


@pytest.mark.parametrize("late", [(0, 1), (1,)])
def test_a_pause_is_no_lack_of_cores(tmp_path: Path, late: tuple[int, ...]) -> None:
    """All lack cores half of the time, and in every tenth step ranks pause for 400 ms."""
    work = np.full((2, 80), 0.04)
    ready, blocked = 0.5 * work, np.zeros_like(work)
    for rank in late:
        work[rank, 9::10] += 0.4
        blocked[rank, 9::10] = 0.4
    sampled(
        tmp_path, work, ready, blocked,
        lambda rank, step, share: "/t.py:7 pause" if rank in late and step % 10 == 9 and share > 0.09 else "/t.py:1 f",
    )  # fmt: skip
    found = explain(tmp_path)
    told = next(one for one in found.verdicts if one.kind == "slow steps")
    assert "mostly in t.py:7 (pause)" in told.sentence
    assert found.parts is not None
    rows = dict(found.parts.waterfall())
    assert sum(rows.values()) == pytest.approx(found.parts.step_s, rel=1e-9)
    pauses_s = 0.4 * 8 / 78 * len(late) / 2
    assert rows["blocked (a file, a lock, a pause)"] == pytest.approx(pauses_s, rel=0.1)
    assert rows.get("waiting for a core", 0.0) < 0.1 * pauses_s


def test_a_busy_machine_is_no_excuse_for_more_time_at_the_loader_than_cores_are_lacking(tmp_path: Path) -> None:
    zero_s = time.perf_counter()
    for loads_s, folder in ((0.21, "slow"), (0.08, "busy")):
        for rank in range(2):
            record = RankRecord(tmp_path / folder, rank, 2)
            for step in range(20):
                at_s = zero_s + 0.3 * step
                record.span(PHASE, at_s, at_s + loads_s, "data")
                record.span(STEP, at_s, at_s + 0.3, seq=step + 1)
                record.row(1, SAMPLE, nbytes=1 << 28, times=(at_s, 0.0, 0.03 * step, 0.06 * step, 0.0))
            record.ended()
    assert [one.kind for one in explain(tmp_path / "slow").verdicts] == ["loading data", "busy machine"]
    assert [one.kind for one in explain(tmp_path / "busy").verdicts] == ["busy machine"]


def test_steps_that_all_take_longer_are_told_though_no_rank_is_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = np.full((3, 60), 0.02)
    work[:, 30:] *= 2.0
    recorded(tmp_path, monkeypatch, work, np.zeros_like(work))
    found = explain(tmp_path)
    assert found.verdicts == ()
    (said,) = found.remarks
    assert said.startswith(
        "steps take 47% longer than the quickest of them, since step 31, most in computation (10.3 ms"
    )


@pytest.mark.long
def test_a_run_is_replayed_as_it_was_and_without_a_delay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, "compute", 4.0)
    parts = parts_of(read_run(tmp_path))
    assert parts is not None
    # The replay drops only what is between an operation's end and its notice, and the ends of ranks' last steps.
    replay = Replay(parts)
    before_s = replay.run().seconds
    assert before_s == pytest.approx(float(parts.bounds_s[:, -1].max() - parts.bounds_s[:, 0].min()), rel=0.1)
    # Without 40 of 50 ms and more a step takes at least the 10 ms that every rank sleeps.
    work = parts.work
    less = np.clip(np.median(work[:FAULTY], axis=0) / work[FAULTY], 0.0, 1.0)
    assert 0.01 * parts.steps * 0.95 < replay.run({FAULTY: less}).seconds < 0.7 * before_s
    with pytest.raises(SystemExit):
        main(["explain", str(tmp_path), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["verdicts"][0]["ranks"] == [FAULTY]
    assert told["hang"] is None
    with pytest.raises(SystemExit):
        main(["explain", str(tmp_path)])
    assert "evidence (high confidence)" in capsys.readouterr().out


def test_a_folder_without_records_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="HOCKET_RECORD"):
        explain(tmp_path)


SCRIPT = """
import time, torch, torch.distributed as dist
dist.init_process_group("hocket")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    time.sleep(0.01 if dist.get_rank() else 0.06)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        dist.all_reduce(parameter.grad)
    optimizer.step()
"""


def test_hocket_run_says_at_the_end_who_was_late_and_leaves_nothing(
    hocket_forked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = hocket_forked("run", "-n", "2", str(script), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "hocket: rank 0 of 2" in ended.stderr
    assert "train.py:7" in ended.stderr
    assert not list(tmp_path.glob("**/*.record"))
