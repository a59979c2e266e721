"""Which plans are run after the references have been fitted, and how their times are read with the first ones."""

from __future__ import annotations

import dataclasses

import pytest

from hocket.calibrate import Calibration
from hocket.calibrate._references import _axes, _in_parts, _references, further_plans, merged
from hocket.planner import Constants, MeasuredPlan, Plan, fitted, predict, reference_plans
from hocket.workload import Workload
from tests.planner.test_captured import captured as captured  # a fixture
from tests.planner.test_fit import BATCH, GUESS, NETWORK, plans_of, step_s

TWO = Plan(data_parallel_degree=2)
SHARDED = dataclasses.replace(TWO, shard="optimizer")
DIVIDED = Plan(data_parallel_degree=1, tensor_parallel_degree=2)


def _known(workload: Workload, true_s: dict[Plan, float]) -> Calibration:
    runs = tuple(MeasuredPlan(*one) for one in true_s.items())
    network, constants = fitted(runs, workload, NETWORK, GUESS, batch=BATCH)
    return Calibration(workload, network, constants, runs)


def _true(workload: Workload, constants: Constants = GUESS) -> dict[Plan, float]:
    plans = [plan.resolve(4) for plan in reference_plans(plans_of(workload), 4)]
    return {plan: step_s(plan, workload, NETWORK, constants) for plan in plans}


@pytest.mark.long
def test_a_run_that_took_twice_as_long_as_foretold_is_run_again_after_the_fastest(captured: Workload) -> None:
    true_s = _true(captured)
    disturbed = next(plan for plan in true_s if plan.pipeline_parallel_degree == 2)
    true_s[disturbed] *= 2.2
    first, *rest = further_plans(_known(captured, true_s), 4, BATCH)
    assert first == min(true_s, key=true_s.__getitem__)
    assert disturbed in rest


@pytest.mark.long
def test_who_may_be_chosen_is_run(captured: Workload) -> None:
    true_s = _true(captured)
    best = min(plans_of(captured), key=lambda plan: step_s(plan, captured, NETWORK, GUESS)).resolve(4)
    true_s.pop(best, None)
    found = further_plans(_known(captured, true_s), 4, BATCH)
    each = {
        plan: predict(plan, captured, NETWORK, workers=4, batch=BATCH, constants=GUESS).step_s
        for plan in (best, *found[1:])
    }
    assert min(each[plan] for plan in found[1:]) <= 1.05 * each[best]


def test_of_a_form_that_cannot_be_hoped_for_one_plan_is_run_if_there_is_time(captured: Workload) -> None:
    slow = dataclasses.replace(GUESS, exchange_s=1e3)
    known = Calibration(captured, NETWORK, slow)
    found = _references(known, 4, BATCH)
    divided = [plan for plan in found if plan.tensor_parallel_degree > 1]
    assert len(divided) == 1
    forms = [(_axes(plan), _in_parts(plan)) for plan in found]
    assert forms.index((_axes(divided[0]), _in_parts(divided[0]))) < len(set(forms)) + 2  # before second ones
    assert not any(plan.tensor_parallel_degree > 1 for plan in _references(known, 4, BATCH, 10.0))


def test_of_a_plan_that_was_run_twice_the_shorter_counts_and_a_slow_phase_is_divided_out() -> None:
    before = [MeasuredPlan(TWO, 1.0), MeasuredPlan(SHARDED, 1.2)]
    after = [MeasuredPlan(TWO, 2.0), MeasuredPlan(SHARDED, 2.4), MeasuredPlan(DIVIDED, 1.8)]
    found = {run.plan: run.step_s for run in merged(before, after)}
    assert found == {TWO: 1.0, SHARDED: 1.2, DIVIDED: 0.9}
    assert merged(before, []) == before
    assert merged(before, after[2:]) == before  # the fastest could not be run again: nothing tells the phase


def test_a_disturbance_of_the_fastest_is_no_phase_of_the_machine() -> None:
    before = [MeasuredPlan(TWO, 1.0), MeasuredPlan(SHARDED, 1.5)]
    after = [MeasuredPlan(TWO, 1.3), MeasuredPlan(SHARDED, 1.5), MeasuredPlan(DIVIDED, 1.2)]
    found = {run.plan: run.step_s for run in merged(before, after)}
    assert found == {TWO: 1.0, SHARDED: 1.5, DIVIDED: 1.2}


def test_data_parallelism_in_parts_is_a_form_of_its_own_and_with_sharded_gradients_another(captured: Workload) -> None:
    found = _references(Calibration(captured, NETWORK, GUESS), 4, BATCH)
    forms = [(_axes(plan), plan.shard_degree, plan.micro_batches > 2 * plan.pipeline_parallel_degree) for plan in found]
    second = min(
        number for number, form in enumerate(forms[1:], 1) if form in forms[:number] and not _parts(found[number])
    )
    early = [(plan.shard, plan.accumulate > 1) for plan in found[:second] if plan.data_parallel_degree == 4]
    assert ("none", True) in early
    assert ("gradients", True) in early


def _parts(plan: Plan) -> bool:
    return any(_in_parts(plan))
