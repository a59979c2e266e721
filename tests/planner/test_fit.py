"""Constants fitted on a few plans, held against the constants that all plans were made with."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import statistics

import pytest

from hocket.planner import (
    Constants,
    MeasuredPlan,
    Network,
    Plan,
    admissible_plans,
    fitted,
    predict,
    reference_plans,
)
from hocket.planner.fits._fit import _NOT_OF
from hocket.workload import Workload

from .test_captured import captured as captured  # a fixture

BATCH = 64
NETWORK = Network("four ranks", 4, 1, 1e9, 1e-4, 1e9, 1e9, 1e-4, 0.0, 0.0, 2**34, 0.0, at_once=1.9)
GUESS = Constants(collective_s=0.0, prefetch=False, step_s=2e-3, stage_s=5e-4, block_s=1e-3, exchange_s=2e-4)


def plans_of(workload: Workload, network: Network = NETWORK) -> list[Plan]:
    found = admissible_plans(workload, network, workers=network.world, batch=BATCH, fixed={"recompute": False})
    parts = (1, 2, 4, 8, 16)
    return [p for p in found if p.accumulate in (1, 4) and p.micro_batches in parts and p.stages_per_rank <= 2]


@functools.cache
def step_s(plan: Plan, workload: Workload, network: Network, constants: Constants) -> float:
    return predict(plan, workload, network, workers=network.world, batch=BATCH, constants=constants).step_s


def errors(workload: Workload, truth: tuple[Network, Constants], believed: tuple[Network, Constants]) -> list[float]:
    """Of all plans, how far the times by what is believed are from the true ones: ratios' logarithms."""
    return [
        abs(math.log(step_s(plan, workload, *believed) / step_s(plan, workload, *truth)))
        for plan in plans_of(workload, truth[0])
    ]


def test_references_are_one_of_each_form_and_the_ends_of_degrees(captured: Workload) -> None:
    plans = plans_of(captured)
    found = reference_plans(plans, 4)
    shown = sorted((p.shard, p.tensor_parallel_degree, p.pipeline_parallel_degree, _parts(p)) for p in found)
    assert shown == [
        ("gradients", 1, 1, 4),
        ("none", 1, 1, 1),
        ("none", 1, 1, 4),
        ("none", 1, 2, 2),
        ("none", 1, 2, 8),
        ("none", 1, 4, 4),
        ("none", 1, 4, 16),
        ("none", 2, 1, 1),
        ("none", 2, 1, 4),
        ("none", 4, 1, 1),
        ("none", 4, 1, 4),
        ("optimizer", 1, 1, 1),
        ("parameters", 1, 1, 1),
        ("parameters", 1, 1, 4),
    ]
    assert len(found) < len(plans) / 3


def _parts(plan: Plan) -> int:
    return plan.micro_batches * plan.accumulate


@pytest.fixture(scope="module")
def as_foretold(captured: Workload) -> tuple[Network, Constants]:
    """The fit to runs that took what was foretold."""
    runs = [
        MeasuredPlan(plan, step_s(plan, captured, NETWORK, GUESS)) for plan in reference_plans(plans_of(captured), 4)
    ]
    return fitted(runs, captured, NETWORK, GUESS, batch=BATCH)


@pytest.mark.parametrize("name", sorted(_NOT_OF))
def test_of_plans_that_a_constant_is_not_of_it_changes_nothing(captured: Workload, name: str) -> None:
    known = getattr(GUESS, name)
    other = dataclasses.replace(GUESS, **{name: 0.5 * known if name.endswith("_share") else 3 * known + 1e-3})
    moved = {True: 0, False: 0}
    for plan in plans_of(captured):
        same = step_s(plan, captured, NETWORK, other) == step_s(plan, captured, NETWORK, GUESS)
        moved[_NOT_OF[name](plan.resolve(NETWORK.world))] += not same
    assert moved[True] == 0
    assert moved[False] > 0


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
def test_constants_that_are_off_are_found_again_by_a_few_noisy_runs(captured: Workload, seed: int) -> None:
    draw = random.Random(seed)

    def off(value: float, by: float) -> float:
        return value * math.exp(draw.uniform(-by, by))

    costs = {name: off(getattr(GUESS, name), 1.0) for name in ("step_s", "stage_s", "block_s", "exchange_s")}
    truth = (
        dataclasses.replace(NETWORK, at_once=off(NETWORK.at_once, 0.3)),
        dataclasses.replace(GUESS, pass_s=draw.uniform(0, 2e-3), **costs),
    )
    runs = [
        MeasuredPlan(plan, step_s(plan, captured, *truth) * math.exp(draw.gauss(0, 0.03)))
        for plan in reference_plans(plans_of(captured), 4)
    ]
    before = errors(captured, truth, (NETWORK, GUESS))
    after = errors(captured, truth, fitted(runs, captured, NETWORK, GUESS, batch=BATCH))
    # Runs vary by 3%: so should most plans that nobody ran; those of many more parts and blocks by more.
    assert statistics.median(after) < max(0.03, statistics.median(before) / 2)
    assert max(after) < 0.25


@pytest.mark.long
def test_one_disturbed_run_does_not_move_the_others(captured: Workload) -> None:
    truth = (NETWORK, GUESS)
    plans = reference_plans(plans_of(captured), 4)
    runs = [MeasuredPlan(plan, step_s(plan, captured, *truth)) for plan in plans]
    disturbed = next(i for i, run in enumerate(runs) if run.plan.pipeline_parallel_degree == 2)
    runs[disturbed] = dataclasses.replace(runs[disturbed], step_s=2.5 * runs[disturbed].step_s)
    found = fitted(runs, captured, NETWORK, GUESS, batch=BATCH)
    assert statistics.median(errors(captured, truth, found)) < 0.03


def test_what_was_measured_as_foretold_changes_little(
    captured: Workload, as_foretold: tuple[Network, Constants]
) -> None:
    network, constants = as_foretold
    assert network.at_once == pytest.approx(NETWORK.at_once, rel=0.02)
    # What was nothing is now a little: a step's 2 ms for every 500 that the shortest run takes.
    assert max(errors(captured, (NETWORK, GUESS), (network, constants))) < 0.08


def test_without_runs_everything_stays_and_is_less_sure(captured: Workload) -> None:
    assert fitted([], captured, NETWORK, GUESS, batch=BATCH) == (NETWORK, dataclasses.replace(GUESS, unmodelled=0.12))


@pytest.mark.long
def test_what_runs_disagree_in_makes_intervals_wider_and_what_they_agree_in_narrower(
    captured: Workload, as_foretold: tuple[Network, Constants]
) -> None:
    plans = reference_plans(plans_of(captured), 4)

    def unmodelled(count: int, noise: float) -> float:
        draw = random.Random(count)
        runs = [
            MeasuredPlan(plan, step_s(plan, captured, NETWORK, GUESS) * math.exp(draw.gauss(0, noise)))
            for plan in plans[:count]
        ]
        return fitted(runs, captured, NETWORK, GUESS, batch=BATCH)[1].unmodelled

    agreed = as_foretold[1].unmodelled
    assert 0.12 > unmodelled(1, 0) > unmodelled(3, 0) > agreed
    assert unmodelled(len(plans), 0.3) > 1.3 * agreed


def test_ranks_with_processors_of_their_own_stay_so(captured: Workload) -> None:
    network = dataclasses.replace(NETWORK, at_once=0.0)
    runs = [MeasuredPlan(plan, 3 * step_s(plan, captured, network, GUESS)) for plan in plans_of(captured)[:3]]
    assert fitted(runs, captured, network, GUESS, batch=BATCH)[0] == network


def test_what_messages_reach_of_a_slow_link_is_found(captured: Workload) -> None:
    network = dataclasses.replace(NETWORK, host_Bps=1e5, rank_Bps=1e5, at_once=0.0)
    truth = dataclasses.replace(GUESS, message_share=0.5)
    plans = [plan for plan in reference_plans(plans_of(captured, network), 4) if plan.pipeline_parallel_degree > 1]
    runs = [MeasuredPlan(plan, step_s(plan, captured, network, truth)) for plan in plans]
    found = fitted(runs, captured, network, GUESS, batch=BATCH)
    assert found[1].message_share == pytest.approx(0.5, rel=0.15)
    for run in runs:
        assert step_s(run.plan, captured, *found) == pytest.approx(run.step_s, rel=0.03)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("times", [0.5, 1.6])
def test_how_fast_layers_of_which_ranks_have_a_part_compute_is_found_and_moves_all_such_plans(
    captured: Workload, times: float
) -> None:
    """Of the weights a part may stay in a cache where the whole does not."""
    truth = dataclasses.replace(GUESS, divided_times=times)
    runs = [
        MeasuredPlan(plan, step_s(plan, captured, NETWORK, truth)) for plan in reference_plans(plans_of(captured), 4)
    ]
    network, constants = fitted(runs, captured, NETWORK, GUESS, batch=BATCH)
    assert constants.divided_times == pytest.approx(times, rel=0.2)
    unseen = [
        plan
        for plan in plans_of(captured)
        if plan.tensor_parallel_degree > 1 and plan not in {run.plan for run in runs}
    ]
    off = [abs(math.log(step_s(p, captured, network, constants) / step_s(p, captured, NETWORK, truth))) for p in unseen]
    assert statistics.median(off) < 0.05


@pytest.mark.long
def test_what_stages_cost_is_found_where_pipelines_wait_for_a_slow_network(captured: Workload) -> None:
    # Such a pipeline takes no longer if a stage costs a little more, only if it costs much more: by slopes at a point,
    # the fit stayed where it began, and plans on an emulated fabric were predicted a third too fast.
    held = {"forward_s": 1e-3, "backward_s": 2e-3, "output_bytes": 196608.0}
    layers = []
    for layer in captured.layers:
        nbytes = 400_000 * (layer.parameters > 128)
        each = {"parameters": nbytes // 4, "parameter_bytes": nbytes, "gradient_bytes": nbytes}
        layers.append(dataclasses.replace(layer, **held, **each, optimizer_bytes=2 * nbytes))
    model = dataclasses.replace(captured, layers=tuple(layers))
    network = dataclasses.replace(NETWORK, world=8, inside_Bps=12e6, host_Bps=12e6, rank_Bps=12e6, at_once=1.6)
    believed = dataclasses.replace(GUESS, stage_s=8e-4, message_share=0.94)
    true = dataclasses.replace(believed, stage_s=2.8e-3)
    timed = functools.partial(predict, workload=model, workers=8, batch=32)
    every = admissible_plans(model, network, workers=8, batch=32, fixed={"recompute": False})
    first = sorted(reference_plans(every, 8), key=lambda plan: timed(plan, cluster=network, constants=believed).step_s)[
        :7
    ]
    true_s = {plan: timed(plan, cluster=network, constants=true).step_s for plan in (*first, *every[::9])}
    wires, found = fitted([MeasuredPlan(plan, true_s[plan]) for plan in first], model, network, believed, batch=32)
    assert found.stage_s == pytest.approx(true.stage_s, rel=0.3)
    apart = [math.log(timed(plan, cluster=wires, constants=found).step_s / true_s[plan]) for plan in true_s]
    assert statistics.median(map(abs, apart)) < 0.03
    assert max(map(abs, apart)) < 0.15
