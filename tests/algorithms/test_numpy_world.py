"""The interpreter that all else is held against notices what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.algorithms import algorithms
from hocket.schedule import Collective, Schedule, Step

from .numpy_world import expected, run


def right(schedule: Schedule) -> bool:
    data = np.random.default_rng(0).integers(1, 1 << 40, (schedule.world, schedule.chunks, 1))
    value, must = expected(schedule.collective, schedule.chunks, data, "sum")
    try:
        got = run(schedule, data, "sum")
    except AssertionError:
        return False
    return bool((got == value).all(axis=2)[must].all())


@pytest.mark.parametrize("algorithm", algorithms(), ids=lambda one: one.name)
def test_a_dropped_transfer_is_noticed(algorithm) -> None:
    parameters = {"local": 2} if "local" in algorithm.parameters else {}
    for kind in algorithm.kinds:
        schedule = algorithm(Collective(kind, 8), **parameters)
        assert right(schedule)
        steps = list(schedule.each_step())
        for number, step in enumerate(steps):
            rest = step.take(np.arange(len(step)) > 0)
            assert not right(
                Schedule(
                    "broken",
                    schedule.collective,
                    schedule.chunks,
                    (*steps[:number], rest, *steps[number + 1 :]),
                    schedule.switches,
                )
            )


def test_counting_a_rank_twice_is_noticed() -> None:
    twice = (Step.of([0, 1], [1, 0], reduce=True), Step.of(0, 1, reduce=True))
    assert not right(Schedule("twice", Collective("all_reduce", 2), 1, twice))


def test_copies_that_meet_are_noticed() -> None:
    meet = (Step.of([0, 2], [1, 1], [0, 0], reduce=[True, False]),)
    with pytest.raises(AssertionError, match="meet"):
        run(Schedule("meet", Collective("reduce", 3, 1), 1, meet), np.ones((3, 1, 1)), "sum")


def test_sending_what_is_not_there_is_noticed() -> None:
    with pytest.raises(AssertionError, match="does not hold"):
        run(
            Schedule("early", Collective("broadcast", 3), 1, (Step.of([1], [2], reduce=False),)),
            np.ones((3, 1, 1)),
            "sum",
        )
