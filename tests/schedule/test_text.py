"""Text and JSON give back the very schedule that was written, and say where they cannot be read."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.schedule import KINDS, Collective, Schedule, ScheduleError, Step, from_json, parse, to_json

from .brute_force import halving_doubling, ring


@st.composite
def schedules(draw):
    kind = draw(st.sampled_from(KINDS))
    world = draw(st.integers(1, 5))
    rooted = kind in ("reduce", "broadcast", "gather", "scatter")
    collective = Collective(kind, world, draw(st.integers(0, world - 1)) if rooted else 0)
    switches = tuple(draw(st.lists(st.sampled_from(["s0", "leaf.1", "up/2"]), unique=True)))
    chunks = collective.blocks * draw(st.integers(1, 3))
    endpoints = world + len(switches)
    steps = []
    for _ in range(draw(st.integers(0, 4)) if endpoints > 1 else 0):
        rows = []
        for _ in range(draw(st.integers(0, 5))):
            source = draw(st.integers(0, endpoints - 1))
            destination = draw(st.integers(0, endpoints - 1).filter(lambda e, s=source: e != s))
            start = draw(st.integers(0, chunks - 1))
            rows.append((source, destination, start, draw(st.integers(start + 1, chunks)), draw(st.booleans())))
        columns = [list(column) for column in zip(*rows, strict=True)] or [[]] * 5
        one = all(row[3] == row[2] + 1 for row in rows)
        repeat = draw(st.integers(1, 3)) if one else 1
        shift = draw(st.integers(-2, 2))
        steps.append(Step.of(*columns[:4], reduce=columns[4], repeat=repeat, shift=shift))
    return Schedule(draw(st.sampled_from(["ring", "a.b-c"])), collective, chunks, tuple(steps), switches)


@settings(max_examples=200, deadline=None)
@given(schedules())
def test_both_forms_round_trip(schedule):
    assert parse(str(schedule)) == schedule
    assert str(parse(str(schedule))) == str(schedule)
    assert from_json(to_json(schedule)) == schedule


def test_schedules_that_differ_in_one_number_are_not_equal():
    assert ring(4) == ring(4)
    assert ring(4) != ring(5)
    assert parse(str(ring(4)).replace("0 -> 1 reduce 0", "0 -> 1 reduce 1")) != ring(4)
    assert ring(4) != "ring"


def test_comments_and_empty_lines_are_left_out():
    text = str(ring(3)).replace("\nstep", "\n\n# the next phase\nstep", 1)
    assert parse(text) == ring(3)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schedule ring", "plan ring", "line 1"),
        ("all_reduce", "all_reduse", "line 1: collective 'all_reduse' is unknown; there are all_reduce"),
        ("world=4", "world=four", "line 1: 'world=four'"),
        ("chunks=4", "", "line 1: .*chunks=N must be given"),
        ("  0 -> 1 reduce 0", "  0 -> 9 reduce 0", "line 3: endpoint '9' is neither a rank below 4 nor a switch"),
        ("  0 -> 1 reduce 0", "  0 to 1 reduce 0", "line 3: .*expected 'step' or"),
        ("  0 -> 1 reduce 0", "  0 -> 1 reduce 4:2", "step 0, transfer 0: chunks 4:2 are not a range within 0:4"),
        ("  0 -> 1 reduce 0", "  0 -> 0 reduce 0", "step 0, transfer 0: endpoint 0 sends to itself"),
        ("repeat=3 shift=-1", "repeat=0 shift=0", "step 0: repeat=0; give 1 or more"),
        ("repeat=3", "times=3", "line 2: 'times=3'; expected repeat or shift"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(old, new, message):
    with pytest.raises(ScheduleError, match=message):
        parse(str(ring(4)).replace(old, new, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("chunks"), r"\$\.chunks is missing"),
        (lambda d: d.update(order="1f1b"), "is the order of a pipeline, which is read from text"),
        (lambda d: d["collective"].update(world="4"), r"\$\.collective\.world: '4' is no int"),
        (lambda d: d["steps"][1]["source"].__setitem__(2, 1.5), r"\$\.steps\[1\]\.source\[2\]: 1\.5 is no int"),
        (lambda d: d["steps"][0]["reduce"].pop(), r"\$\.steps\[0\]: the columns are of different lengths"),
        (lambda d: d.update(steps={}), r"\$\.steps: \{\} is no list"),
    ],
)
def test_errors_in_json_carry_the_path(change, message):
    document = json.loads(to_json(ring(4)))
    change(document)
    with pytest.raises(ScheduleError, match=message):
        from_json(json.dumps(document))


def test_no_json_at_all():
    with pytest.raises(ScheduleError, match="no JSON"):
        from_json("{")


def test_written_out_steps_are_those_of_the_repetition():
    schedule = ring(5)
    written = Schedule("ring", schedule.collective, 5, tuple(schedule.each_step()))
    assert written.step_count == schedule.step_count == 8
    for a, b in zip(written.columns(), schedule.columns(), strict=True):
        assert np.array_equal(a, b)
    assert np.array_equal(schedule.columns().start[5:10], (np.arange(5) - 1) % 5)


def test_a_part_holds_what_one_rank_does_and_pieces_hold_the_same_bytes():
    schedule = halving_doubling(8)
    part = schedule.part(3)
    assert part.transfer_count == 12
    assert part.sent()[3] == schedule.sent()[3]
    assert schedule.split(4).sent() == schedule.sent()
    assert schedule.split(4).chunks == 32
    with pytest.raises(ScheduleError, match="multiple of 3"):
        Schedule("x", Collective("all_gather", 3), 4, ())


def test_nobody_can_write_to_a_step():
    with pytest.raises(ValueError, match="read-only"):
        ring(3).steps[0].source[0] = 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schedule x all_reduce world=2 chunks=1\nstep\n  0 -> 1 copy 9999999999\n", r"line 2: .*below 2\*\*31"),
        ("schedule x all_reduce world=2 chunks=3000000000\n", r"less than 2\*\*31"),
        (f"schedule x all_reduce world={'9' * 5000} chunks=2\n", "line 1: 'world=9"),
        (f"schedule x all_reduce world=2 chunks=2\nstep\n  0 -> {'9' * 5000} copy 0\n", "line 3: endpoint '9"),
    ],
)
def test_numbers_that_are_too_large_are_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        parse(text)
