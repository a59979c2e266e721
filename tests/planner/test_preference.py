"""Of plans that are predicted to be as fast, the simplest is taken; and it is said why."""

from __future__ import annotations

import dataclasses

import pytest

from hocket import cluster
from hocket.planner import NEAR, Network, Plan, Prediction, explain, plan_rows, preferred, search, with_reasons
from hocket.planner import predict as predict_plan
from hocket.workload import Layer, Operation, Workload

PLAIN = Plan()
OPTIMIZER = Plan(shard="optimizer")
GRADIENTS = Plan(shard="gradients")
PARAMETERS = Plan(shard="parameters")
TENSOR = Plan(tensor_parallel_degree=2)
PIPELINE = Plan(pipeline_parallel_degree=2, micro_batches=4)
BOTH = Plan(tensor_parallel_degree=2, pipeline_parallel_degree=2, micro_batches=4)


@pytest.mark.parametrize(
    ("simple", "other"),
    [
        (PLAIN, OPTIMIZER),
        (OPTIMIZER, GRADIENTS),
        (GRADIENTS, PARAMETERS),
        (PLAIN, TENSOR),
        (PARAMETERS, TENSOR),
        (OPTIMIZER, PIPELINE),
        (PLAIN, PIPELINE),
        (TENSOR, BOTH),
        (PLAIN, Plan(accumulate=4)),
        (PLAIN, Plan(recompute=True)),
        (PIPELINE, Plan(pipeline_parallel_degree=2, micro_batches=8)),
        (TENSOR, Plan(tensor_parallel_degree=4)),
    ],
)
def test_the_simpler_of_two_like_plans_is_taken_whichever_comes_first(simple: Plan, other: Plan) -> None:
    near = 1 + 0.9 * NEAR
    assert preferred([(simple, near), (other, 1.0)]) == 0
    assert preferred([(other, 1.0), (simple, near)]) == 1
    assert preferred([(simple, 1.0), (other, 1.0)]) == 0


def test_a_plan_that_is_faster_by_more_than_the_margin_is_taken() -> None:
    assert preferred([(PLAIN, 1 + 1.1 * NEAR), (BOTH, 1.0)]) == 1


def test_what_is_near_is_near_the_fastest_and_no_chain_of_neighbours() -> None:
    steps = [(PLAIN, 1 + 1.6 * NEAR), (OPTIMIZER, 1 + 0.8 * NEAR), (BOTH, 1.0)]
    assert preferred(steps) == 1


def net(state: int = 4 * 10**5) -> Workload:
    """Layers that compute for some ms and have little to reduce: all forms of data parallelism are as fast."""
    work = (Operation("forward", 1e9, saved_bytes=1e4),)
    layers = tuple(Layer(f"l{i}", "x", 10**5, state, state, 2 * state, 1e3, work, 1e-2, 2e-2) for i in range(6))
    return Workload("net", 1, layers)


def step_of(plan: Plan, limit: int = 0) -> Prediction:
    where = cluster.load("star:hosts=4,bandwidth=10Gbit/s")
    return predict_plan(plan, net(), where, workers=4, batch=4, memory_limit=limit)


def test_the_search_takes_plain_data_parallelism_where_sharding_gains_nothing() -> None:
    found = search(net(), cluster.load("star:hosts=4,bandwidth=10Gbit/s"), workers=4, batch=4, memory_limit=0)
    plan = found.best.plan
    assert (plan.shard, plan.data_parallel_degree, plan.accumulate) == ("none", 4, 1)
    assert found.best.step_s <= found.ranked[0].step_s * (1 + NEAR)
    assert [one.step_s for one in found.ranked] == sorted(one.step_s for one in found.ranked)
    assert found.others == tuple(one for one in found.ranked if one is not found.best)


def test_the_explanation_names_the_faster_plan_and_the_margin() -> None:
    found = search(net(), cluster.load("star:hosts=4,bandwidth=10Gbit/s"), workers=4, batch=4, memory_limit=0)
    assert found.choice > 0  # something less simple is a little faster: the optimizer's work is shared out
    text = explain(found)
    assert f"Predictions within {NEAR:.0%} of each other cannot be told apart" in text
    assert f"The runner-up is {found.ranked[0].plan.describe()}" in text
    assert "It is predicted to be" in text
    first = dataclasses.replace(found.ranked[0], parts=found.best.parts)
    equal = dataclasses.replace(found, ranked=(first, *found.ranked[1:]))
    assert "It is predicted to be as fast. Predictions within" in explain(equal)
    rows = plan_rows(found)
    assert rows[0]["why not"] == "chosen"
    assert "faster, which is within the prediction's error, and less simple" in rows[1]["why not"]
    assert "within the prediction's error" in with_reasons(found).reasons["plan"]


def test_a_simple_plan_that_fills_the_memory_is_not_preferred_to_one_that_leaves_room() -> None:
    plain, sharded = Plan(bucket_bytes=2**20), Plan(bucket_bytes=2**20, shard="optimizer")
    where = dataclasses.replace(  # a process is larger than this model
        Network.of(cluster.load("star:hosts=4,bandwidth=10Gbit/s")), sharers=0
    )
    steps = [predict_plan(plan, net(), where, workers=4, batch=4, memory_limit=0) for plan in (plain, sharded)]
    needed = {step.plan.shard: step.memory.total for step in steps}
    assert needed["optimizer"] < 0.85 * needed["none"]
    tight = search(net(), where, workers=4, batch=4, memory_limit=round(needed["none"] * 1.02))
    assert tight.best.plan.shard != "none"
    roomy = search(net(), where, workers=4, batch=4, memory_limit=round(needed["none"] * 1.5))
    assert roomy.best.plan.shard == "none"
