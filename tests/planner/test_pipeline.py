"""Pipelines followed step by step: torch's own orders, the published idle shares, and processors that are shared."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.parallel.pipeline._schedule import actions as followed
from hocket.planner._pipeline import StageWork, order_of, span


def orders(schedule: str, p: int, v: int, m: int) -> list[list[tuple[str, int, int]]]:
    return [order_of(schedule, p, v, m, rank) for rank in range(p)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (4, 4), (4, 16), (3, 7)])
def test_equal_stages_take_as_long_as_published(schedule: str, p: int, m: int) -> None:
    # (m + p - 1) forward and backward passes: Huang et al. 2019, section 2.3.
    assert span(orders(schedule, p, 1, m), [StageWork(1.0, 2.0)] * p) == pytest.approx(3 * (m + p - 1))


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 2), (2, 2, 8), (4, 2, 8), (4, 3, 12), (2, 4, 6)])
def test_interleaving_divides_the_idle_time_by_the_stages_of_a_rank(p: int, v: int, m: int) -> None:
    # Narayanan et al., SC'21, section 2.2.2.
    assert span(orders("interleaved", p, v, m), [StageWork(1.0, 2.0)] * (p * v)) == pytest.approx(3 * (m * v + p - 1))


@pytest.mark.parametrize(
    ("schedule", "p", "v", "m"),
    [
        *(("gpipe", p, 1, m) for p, m in [(2, 2), (4, 3)]),
        *(("1f1b", p, 1, m) for p, m in [(2, 2), (2, 8), (4, 4), (4, 16), (3, 7), (4, 2)]),
        *(("interleaved", p, 2, m) for p, m in [(2, 2), (2, 3), (2, 8), (4, 8), (4, 4), (3, 9), (4, 6)]),
        ("interleaved", 4, 3, 12),
    ],
)
def test_the_order_is_the_one_that_the_trainer_follows(schedule: str, p: int, v: int, m: int) -> None:
    for rank, actions in enumerate(followed(schedule, p, v, m)):
        names = {"F": "forward", "B": "backward"}
        found = [(names[one.kind], one.stage, one.micro) for one in actions if one.kind in names]
        assert order_of(schedule, p, v, m, rank) == found


works = st.builds(
    StageWork, *(st.floats(0.1, 2) for _ in range(2)), *(st.floats(0, 0.5) for _ in range(2)), hop=st.floats(0, 0.5)
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(works, min_size=2, max_size=4), st.integers(1, 6), st.floats(0.5, 4), st.sampled_from(["gpipe", "1f1b"])
)
def test_a_step_is_bounded_by_its_longest_way_and_by_the_processors(
    stages: list[StageWork], m: int, at_once: float, schedule: str
) -> None:
    p = len(stages)
    each = [one.forward + one.backward for one in stages]
    whole = [time + one.forward_exchange + one.backward_exchange for time, one in zip(each, stages, strict=True)]
    found = span(orders(schedule, p, 1, m), stages, at_once)
    one_way = sum(whole) + 2 * sum(one.hop for one in stages[:-1])
    assert found >= max(one_way, m * max(whole), m * sum(each) / max(1.0, at_once)) - 1e-9
    assert found <= m * one_way * max(1.0, p / at_once) + 1e-9
    assert found >= span(orders(schedule, p, 1, m), stages) - 1e-9


def test_ranks_that_share_one_processor_take_the_sum_of_their_work() -> None:
    assert span(orders("1f1b", 4, 1, 8), [StageWork(1.0, 2.0)] * 4, 1.0) == pytest.approx(4 * 8 * 3)


def test_messages_of_one_way_go_one_after_the_other() -> None:
    # Four messages of 10 s on one link, then the last stage's two passes and the way back.
    stages = [StageWork(0.1, 0.1, hop=10.0), StageWork(0.1, 0.1)]
    assert span(orders("gpipe", 2, 1, 4), stages) > 4 * 10 + 10


def test_orders_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        span([[("backward", 0, 0), ("forward", 0, 0)], [("forward", 1, 0), ("backward", 1, 0)]], [StageWork(1, 1)] * 2)


def test_nothing_slows_where_there_are_processors_for_all() -> None:
    stages = [StageWork(1.0, 2.0, hop=0.1)] * 3
    assert span(orders("1f1b", 3, 1, 5), stages, 3.0) == span(orders("1f1b", 3, 1, 5), stages, math.inf)
