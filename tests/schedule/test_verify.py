"""The verifier says of every schedule what a naive interpreter that tries all orders says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.schedule import Collective, Schedule, Step, parse, verify

from ..pace import timed
from .brute_force import halving_doubling, keeps_contract, ring

ONE_OF_EACH = [
    ring(2),
    ring(5),
    halving_doubling(4),
    halving_doubling(8),
    Schedule("exchange", Collective("all_reduce", 2), 1, (Step.of([0, 1], [1, 0], reduce=True),)),
    Schedule(
        "one-shot",
        Collective("all_reduce", 3),
        1,
        (Step.of([0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1], reduce=True),),
    ),
    Schedule(
        "switch",
        Collective("all_reduce", 3),
        2,
        (Step.of([0, 1, 2], 3, 0, 2, reduce=True), Step.of(3, [0, 1, 2], 0, 2, reduce=False)),
        ("s",),
    ),
    Schedule(
        "chain",
        Collective("broadcast", 3, 1),
        2,
        (Step.of(1, 2, 0, 2, reduce=False), Step.of(2, 0, 0, 2, reduce=False)),
    ),
    Schedule("star", Collective("reduce", 4, 2), 1, (Step.of([0, 1, 3], 2, reduce=True),)),
    Schedule(
        "direct",
        Collective("all_gather", 3),
        3,
        (Step.of([0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1], [0, 0, 1, 1, 2, 2], reduce=False),),
    ),
    Schedule("direct", Collective("reduce_scatter", 2), 2, (Step.of([0, 1], [1, 0], [1, 0], reduce=True),)),
    Schedule("direct", Collective("all_to_all", 2), 4, (Step.of([0, 1], [1, 0], [1, 2], reduce=False),)),
    Schedule("direct", Collective("gather", 3, 1), 3, (Step.of([0, 2], 1, [0, 2], reduce=False),)),
    Schedule("direct", Collective("scatter", 3, 1), 3, (Step.of(1, [0, 2], [0, 2], reduce=False),)),
    Schedule(
        "dissemination",
        Collective("barrier", 3),
        1,
        (Step.of([0, 1, 2], [1, 2, 0], reduce=True), Step.of([0, 1, 2], [2, 0, 1], reduce=True)),
    ),
    Schedule("alone", Collective("all_reduce", 1), 1, ()),
]


@pytest.mark.parametrize("schedule", ONE_OF_EACH, ids=lambda s: f"{s.name}-{s.collective}")
def test_a_right_schedule_has_no_findings(schedule):
    assert keeps_contract(schedule)
    assert verify(schedule) == ()


def mutate(schedule, how, draw):
    """Drops, duplicates, reorders, redirects or turns one transfer of a schedule."""
    steps = list(schedule.each_step())
    rows = [(s, r) for s, step in enumerate(steps) for r in range(len(step))]
    number, row = draw(st.sampled_from(rows))
    step = steps[number]
    columns = [column[row] for column in step.columns]
    without = step.take(np.arange(len(step)) != row)
    target = draw(st.integers(0, len(steps) - 1))
    if how == "duplicate":
        steps[target] = add(steps[target], columns)
    elif how == "drop":
        steps[number] = without
    elif how == "reorder":
        steps[number] = without
        steps[target] = add(steps[target], columns)
    elif how == "verb":
        steps[number] = add(without, [*columns[:4], not columns[4]])
    else:
        side = draw(st.sampled_from([0, 1, 2]))
        if side == 2:
            length = int(columns[3] - columns[2])
            columns[2] = draw(st.integers(0, schedule.chunks - length))
            columns[3] = columns[2] + length
        else:
            others = [e for e in range(schedule.endpoints) if e not in (columns[0], columns[1])]
            columns[side] = draw(st.sampled_from(others or [int(columns[side])]))
        steps[number] = add(without, columns)
    return Schedule(schedule.name, schedule.collective, schedule.chunks, tuple(steps), schedule.switches)


def add(step, row):
    columns = [np.append(column, value) for column, value in zip(step.columns, row, strict=True)]
    return Step.of(*columns[:4], reduce=columns[4])


@pytest.mark.long
@settings(max_examples=500, deadline=None)
@given(st.data())
def test_of_mutated_schedules_those_that_break_the_contract_are_reported_and_no_others(data):
    schedule = data.draw(st.sampled_from([s for s in ONE_OF_EACH if s.transfer_count]))
    for _ in range(data.draw(st.integers(1, 2))):
        how = data.draw(st.sampled_from(["drop", "duplicate", "reorder", "redirect", "verb"]))
        schedule = mutate(schedule, how, data.draw)
    findings = verify(schedule)
    assert any(finding.breaks for finding in findings) == (not keeps_contract(schedule)), str(schedule)
    for finding in findings:
        assert schedule.endpoint(finding.endpoint) in finding.message
        assert (finding.step is None) == (finding.transfer is None)


def test_a_finding_names_the_rank_the_step_and_the_transfer():
    steps = list(ring(4).each_step())
    steps[1] = add(steps[1], [column[0] for column in steps[1].columns])
    first, *_ = verify(Schedule("ring", Collective("all_reduce", 4), 4, tuple(steps)))
    assert (first.kind, first.endpoint, first.chunk, first.step, first.transfer) == ("duplicate", 0, 3, 1, 4)
    assert "rank 0 holds chunk 3" in str(first)
    assert "step 1, transfer 4 (0 -> 1 reduce)" in str(first)


def test_what_is_missing_is_followed_to_where_it_stops():
    steps = list(ring(4).each_step())
    steps[1] = steps[1].take(np.array([0, 1, 2]))  # without 3 -> 0 of chunk 2
    findings = verify(Schedule("ring", Collective("all_reduce", 4), 4, tuple(steps)))
    assert {finding.kind for finding in findings} == {"missing"}
    assert "goes no further than step 0, transfer 2 (2 -> 3 reduce)" in str(findings[0])


def test_an_order_that_matters_is_a_race_and_breaks_the_contract_only_if_the_outcome_is_read():
    world = Collective("broadcast", 3)
    bad = Schedule("race", world, 1, (Step.of([0, 1], [2, 2], reduce=False), Step.of(0, 1, reduce=False)))
    assert [(f.kind, f.breaks, f.endpoint, f.step) for f in verify(bad)] == [("race", True, 2, 0)]
    mended = Schedule("race", world, 1, (*bad.steps, Step.of(0, 2, reduce=False)))
    assert [(f.kind, f.breaks, f.endpoint, f.step) for f in verify(mended)] == [("race", False, 2, 0)]


def test_findings_are_limited():
    empty = Schedule("nothing", Collective("all_reduce", 30), 30, ())
    assert len(verify(empty, limit=7)) == 7


@pytest.mark.long
def test_beyond_a_few_hundred_ranks_random_numbers_find_a_lost_and_a_double_contribution():
    for schedule in (ring(700), ring(1024), halving_doubling(1024)):
        assert verify(schedule) == ()
        steps = list(schedule.each_step())
        steps[1] = steps[1].take(np.arange(len(steps[1])) != 13)
        assert verify(Schedule("lost", schedule.collective, schedule.chunks, tuple(steps)), limit=2)
        steps = list(schedule.each_step())
        steps[1] = add(steps[1], [column[13] for column in steps[1].columns])
        assert verify(Schedule("twice", schedule.collective, schedule.chunks, tuple(steps)), limit=2)


@pytest.mark.long
def test_halving_doubling_of_65536_ranks_is_verified_in_seconds():
    findings, took_s = timed(lambda: verify(halving_doubling(65536)))
    assert findings == ()
    assert took_s < 10


@pytest.mark.long
def test_what_is_lost_among_many_ranks_is_found_though_it_makes_ranges_uneven():
    schedule = halving_doubling(8192)
    steps = list(schedule.steps)
    steps[15] = steps[15].take(np.arange(len(steps[15])) != 4000)
    findings = verify(Schedule("lost", schedule.collective, schedule.chunks, tuple(steps)), limit=1)
    assert [finding.breaks for finding in findings] == [True]


def test_few_ranks_with_many_chunks_are_verified_in_pieces():
    """A cell that is written in parts, with contributions counted one by one."""
    chunks = 1 << 25
    whole = Schedule("whole", Collective("all_reduce", 2), chunks, (Step.of([0, 1], [1, 0], 0, chunks, reduce=True),))
    assert verify(whole) == ()
    parts = Step.of([0, 0], [1, 1], [0, 7], [7, chunks], reduce=True)
    back = Step.of([1, 1], [0, 0], [0, 1 << 20], [1 << 20, chunks], reduce=False)
    assert verify(Schedule("parts", Collective("all_reduce", 2), chunks, (parts, back))) == ()
    lost = Step.of(1, 0, 0, chunks - 1, reduce=False)
    assert verify(Schedule("lost", Collective("all_reduce", 2), chunks, (parts, lost)))


@pytest.mark.parametrize("make", [halving_doubling, pytest.param(ring, marks=pytest.mark.long)])
def test_schedules_of_4096_ranks_are_verified_in_seconds(make):
    findings, took_s = timed(lambda: verify(make(4096)))
    assert findings == ()
    assert took_s < 15  # 61 s and 75 s when each contribution was counted; 0.1 and 2 s now


def test_a_repeated_step_is_judged_as_the_steps_that_it_stands_for():
    """Random ones: with writes that meet, of both kinds, after a race, and of several chunks at once."""
    rng = np.random.default_rng(0)
    kept = 0
    for number in range(60):
        world, size = int(rng.integers(2, 5)), int(rng.integers(1, 3))
        steps = []
        for _ in range(rng.integers(1, 3)):
            rows = int(rng.integers(1, world + 2))
            source = rng.permutation(world) if rng.random() < 0.8 else rng.integers(0, world, rows)
            destination = (source + rng.integers(1, world)) % world
            start = source * size if rng.random() < 0.7 else rng.integers(0, world, len(source)) * size
            reduce = rng.random(len(source)) < 0.5 if rng.random() < 0.2 else rng.random() < 0.5
            repeat, shift = int(rng.integers(1, world + 1)), int(rng.integers(-1, 2)) * size
            steps.append(Step.of(source, destination, start, start + size, reduce=reduce, repeat=repeat, shift=shift))
        kind = ("all_reduce", "all_gather", "reduce_scatter", "barrier")[number % 4]
        short = Schedule("short", Collective(kind, world), world * size, tuple(steps))
        long = Schedule("short", short.collective, short.chunks, tuple(short.each_step()))
        found = verify(short)
        assert found == verify(long)
        kept += not found
    assert kept


@pytest.mark.parametrize(("all_of_them", "kept"), [("2 -> 0 reduce 0", True), ("1 -> 0 reduce 0", False)])
def test_an_addition_of_what_a_copy_holds_already_may_come_before_it_or_after(all_of_them: str, kept: bool) -> None:
    """Rank 0 has heard of rank 1, and of 2 or not; it is copied to rank 1 while 2 adds to that."""
    steps = ["1 -> 0 reduce 0", all_of_them, "0 -> 1 copy 0\n2 -> 1 reduce 0", "1 -> 0 copy 0\n1 -> 2 copy 0"]
    schedule = parse("\n".join(["schedule mutant barrier world=3 chunks=1", *(f"step\n{one}" for one in steps)]))
    assert keeps_contract(schedule) == kept
    assert any(finding.breaks for finding in verify(schedule)) == (not kept)
