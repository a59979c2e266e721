"""What runs are off by after the fit moves their plans, and less those that are like them."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.planner import (
    Constants,
    MeasuredPlan,
    Plan,
    assumptions,
    fitted,
    predict,
    reference_plans,
    resemblance,
    search,
)
from hocket.planner.step._likeness import least_longer, likeness, longer, place, untried, weights
from hocket.workload import Workload

from .test_captured import captured as captured  # a fixture
from .test_fit import BATCH, GUESS, NETWORK, plans_of, step_s

PLACES = st.lists(st.tuples(*[st.floats(0, 6)] * 3), min_size=1, max_size=6, unique=True)


@given(PLACES, st.floats(0.02, 0.5))
def test_without_noise_each_run_is_met_and_far_from_all_nothing_moves(
    places: list[tuple[float, ...]], deviation: float
) -> None:
    off = [0.2 * math.sin(number + 1) for number in range(len(places))]
    found = weights(places, off, deviation, 1e-3 * deviation)

    def moved(here: tuple[float, ...]) -> float:
        return sum(weight * likeness(here, other) for weight, other in zip(found, places, strict=True))

    near = [(a, b) for a in places for b in places if a < b and likeness(a, b) > 0.9]
    if not near:  # two runs at nearly one place that differ are noise
        assert [moved(one) for one in places] == pytest.approx(off, abs=1e-3)
    assert abs(moved((99.0, 99.0, 99.0))) < 1e-9


@given(st.floats(0.05, 0.5), st.floats(-1, 2))
def test_one_run_counts_as_far_as_it_is_more_than_noise(deviation: float, off: float) -> None:
    (weight,) = weights([(0.0,)], [off], deviation, 0.07)
    assert weight == pytest.approx(min(off, 0.25) * deviation**2 / (deviation**2 + 0.07**2))


def test_likeness_is_1_of_a_plan_with_itself_and_less_the_more_fields_differ() -> None:
    plain = Plan(data_parallel_degree=4)
    sharded = dataclasses.replace(plain, shard="optimizer")
    in_parts = dataclasses.replace(sharded, accumulate=4)
    other = Plan(data_parallel_degree=2, tensor_parallel_degree=2)
    assert resemblance(plain, plain) == 1
    each = [resemblance(plain, one) for one in (sharded, in_parts, other)]
    assert each == sorted(each, reverse=True)
    assert 0 < each[-1] < 0.1
    assert all(resemblance(one, plain) == resemblance(plain, one) for one in (sharded, in_parts, other))


@pytest.mark.long
def test_a_plan_that_no_formula_explains_is_foretold_as_it_ran_and_its_likes_are_moved(captured: Workload) -> None:
    """A sharded optimizer that is a third faster than formulas can say: its half of the state stays in a cache."""
    plans = [plan.resolve(4) for plan in reference_plans(plans_of(captured), 4)]
    true_s = {plan: step_s(plan, captured, NETWORK, GUESS) for plan in plans}
    odd = next(plan for plan in plans if plan.tensor_parallel_degree == 4)
    true_s[odd] /= 1.5
    network, constants = fitted([MeasuredPlan(*one) for one in true_s.items()], captured, NETWORK, GUESS, batch=BATCH)
    plain = dataclasses.replace(constants, seen=())
    was, now = (abs(math.log(step_s(odd, captured, network, one) / true_s[odd])) for one in (plain, constants))
    assert now < was
    assert longer(odd, constants, 4) == pytest.approx(
        step_s(odd, captured, network, constants) / step_s(odd, captured, network, plain)
    )
    assert longer(odd, constants, 8) == 1  # nothing is known of other numbers of workers
    assert least_longer(constants, 8) == 1
    foretold = predict(odd, captured, network, workers=4, batch=BATCH, constants=constants)
    assert foretold.step_s == pytest.approx(sum(seconds for _, seconds in foretold.parts.rows()))


def test_the_interval_of_a_plan_that_was_run_is_narrower(captured: Workload) -> None:
    plans = [plan.resolve(4) for plan in reference_plans(plans_of(captured), 4)]
    ran = Constants(basis="measured", fitted_workers=4, unmodelled=0.2)
    seen = dataclasses.replace(ran, seen=((place(plans[0]), 0.0),))

    def width(plan: Plan, constants: Constants) -> float:
        low, high = predict(plan, captured, NETWORK, workers=4, batch=BATCH, constants=constants).interval_s
        return high / low

    assert width(plans[0], seen) < 0.85 * width(plans[0], ran)
    unlike = min((one for one in plans if not untried(one, seen)), key=lambda plan: resemblance(plan, plans[0]))
    assert 0.9 * width(unlike, ran) < width(unlike, seen) <= width(unlike, ran)


def test_the_interval_of_a_plan_whose_axis_no_run_used_is_wider_and_says_so(captured: Workload) -> None:
    plans = [plan.resolve(4) for plan in reference_plans(plans_of(captured), 4)]
    divided = [plan for plan in plans if plan.tensor_parallel_degree > 1]
    others = [plan for plan in plans if plan.tensor_parallel_degree == 1]
    ran = Constants(basis="measured", fitted_workers=4, unmodelled=0.1)

    def told(plan: Plan, *runs: Plan) -> tuple[float, bool]:
        constants = dataclasses.replace(ran, seen=tuple((place(run), 0.0) for run in runs))
        one = predict(plan, captured, NETWORK, workers=4, batch=BATCH, constants=constants)
        rows = assumptions(one, NETWORK, precision="float32", workload=captured)
        return one.interval_s[1] / one.step_s, "tensor axis" in {row[0] for row in rows}

    assert told(divided[0])[1] is False  # of no runs at all nothing is known of any axis
    tried, untried_one = told(divided[0], divided[-1]), told(divided[0], *others)
    assert (tried[1], untried_one[1]) == (False, True)
    assert math.log(untried_one[0]) > 1.5 * math.log(tried[0])
    assert told(others[0], *others[1:])[1] is False


@pytest.mark.long
@settings(max_examples=5)
@given(st.data())
def test_the_search_misses_no_plan_that_runs_have_moved_to_the_front(captured: Workload, data: st.DataObject) -> None:
    """Slow plans that ran much faster: a bound that knows nothing of them would end the search before it tries them."""
    plain = dataclasses.replace(GUESS, fitted_workers=4)
    formula_s = {
        plan: step_s(plan, captured, NETWORK, plain) for plan in (one.resolve(4) for one in plans_of(captured))
    }
    slow = [plan for plan, seconds in formula_s.items() if 1.3 < seconds / min(formula_s.values()) < 2.2]
    some = data.draw(st.lists(st.sampled_from(slow), min_size=1, max_size=3, unique_by=Plan.describe))
    seen = tuple((place(plan), data.draw(st.floats(-2.0, -0.7), label=plan.describe())) for plan in some)
    constants = dataclasses.replace(plain, seen=seen)
    best_s = min(seconds * longer(plan, constants, 4) for plan, seconds in formula_s.items())
    fixed = {"recompute": False}
    found = search(captured, NETWORK, workers=4, batch=BATCH, constants=constants, fixed=fixed, memory_limit=0, keep=1)
    assert found.ranked[0].step_s <= best_s * (1 + 1e-9)
