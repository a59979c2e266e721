"""The search against trying everything, under limits and constraints; and what it says."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest

from hocket import cluster
from hocket.planner import (
    Constants,
    Network,
    Plan,
    PlanError,
    Prediction,
    Search,
    admissible_plans,
    explain,
    plan_rows,
    predict,
    search,
    with_reasons,
)
from hocket.workload import Layer, Operation, Workload, named_transformer, transformer

from ..pace import timed


@pytest.fixture(scope="module")
def selene() -> Network:
    return Network.of(cluster.load("selene-like"))


def small() -> Workload:
    """A transformer that is quick to try everything for."""
    return transformer(512, 6, 8, vocabulary=1000, sequence=256, name="small")


def everything(workload: Workload, where: Network, workers: int, batch: int) -> list[Prediction]:
    """The predictions of all plans, by trying them."""
    found = []
    degrees = [one for one in (1, 2, 4, 8) if workers % one == 0]
    shards = ("none", "optimizer", "gradients", "parameters")
    again = ({}, {"recompute": True}, {"recompute": True, "recompute_part": "attention"})
    for t, p in itertools.product(degrees, degrees):
        if workers % (t * p) or p > len(workload.layers):
            continue
        d = workers // (t * p)
        each = batch // d
        if not each:
            continue
        for parts, shard, how, stages in itertools.product(range(1, each + 1), shards, again, (1, 2, 3, 4)):
            if p > 1 and parts < p:
                continue
            if each % parts or (stages > 1 and (p == 1 or parts % p or p * stages > len(workload.layers))):
                continue
            plan = Plan(
                tensor_parallel_degree=t,
                sequence_parallel=t > 1,
                pipeline_parallel_degree=p,
                stages_per_rank=stages,
                pipeline_schedule="interleaved" if stages > 1 else "1f1b",
                micro_batches=parts if p > 1 else 1,
                accumulate=1 if p > 1 else parts,
                shard=shard,
                precision="bfloat16",
                **how,
            )
            found.append(predict(plan, workload, where, workers=workers, batch=batch, memory_limit=0))
    return found


@pytest.fixture(scope="module")
def tried(selene: Network) -> list[Prediction]:
    return everything(small(), selene, 8, 16)


@pytest.mark.parametrize("limit", [0, 900, 300, 120])
def test_nothing_that_was_left_out_is_faster(selene: Network, tried: list[Prediction], limit: int) -> None:
    workload, megabytes = small(), limit * 10**6
    found = search(workload, selene, workers=8, batch=16, memory_limit=megabytes)
    # The search also solves the size of buckets, which trying everything leaves at its default.
    plain = min(
        predict(
            Plan.from_json({**one.plan.to_json(), "bucket_bytes": None}),
            workload,
            selene,
            workers=8,
            batch=16,
            memory_limit=megabytes,
        ).step_s
        for one in found.ranked
    )
    fit = [one.step_s for one in tried if not megabytes or one.memory.total <= megabytes]
    assert plain == pytest.approx(min(fit), rel=1e-9)
    assert all(one.fits for one in found.ranked)
    assert [one.step_s for one in found.ranked] == sorted(one.step_s for one in found.ranked)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("limit", [0, 120])  # most of the plans need more than 120 MB
def test_plans_that_are_not_timed_in_full_would_not_have_been_ranked(limit: int) -> None:
    tapered = cluster.load(
        "fattree:k=4,taper=2,bandwidth=20Gbit/s,server=ac922,server.devices=4,server.flops=5e13,server.device_memory=16GiB"
    )
    how = {"workers": 16, "batch": 32, "memory_limit": limit * 10**6}
    found, every = search(small(), tapered, **how), search(small(), tapered, keep=10**6, **how)
    assert [one.plan for one in found.ranked[:8]] == [one.plan for one in every.ranked[:8]]
    assert found.best.plan == every.best.plan
    assert found.timed < 0.7 * every.timed


@functools.cache
def on_1024(name: str, batch: int) -> tuple[Search, float]:
    """What is found for so many workers, and the seconds that it takes on an idle core."""
    selene = Network.of(cluster.load("selene-like"))
    return timed(lambda: search(named_transformer(name), selene, workers=1024, batch=batch))


@pytest.mark.parametrize(("name", "batch"), [("gpt-7b", 1024), pytest.param("gpt-175b", 1536, marks=pytest.mark.long)])
def test_1024_workers_are_planned_in_seconds(name: str, batch: int) -> None:
    found, took_s = on_1024(name, batch)
    assert took_s < 20
    assert found.best.fits
    assert len(found.ranked) > 3
    plan = found.best.plan
    degrees = plan.data_parallel_degree * plan.tensor_parallel_degree * plan.pipeline_parallel_degree
    assert degrees == 1024
    assert plan.resolve(1024) == plan


@pytest.mark.long
def test_parameters_are_sharded_inside_hosts_where_the_network_is_slow() -> None:
    slow = cluster.load("star:hosts=8,bandwidth=100Gbit/s,server=dgx-a100")
    found = search(named_transformer("gpt-7b"), slow, workers=64, batch=512, fixed={"tensor_parallel_degree": 1})
    steps = {one.plan.shard_degree: one for one in found.ranked if one.plan.data_parallel_degree == 64}
    among, memory = steps[8], 80 * 2**30
    assert among.memory.total < memory
    plan = dataclasses.replace(among.plan, shard_degree=0, bucket_bytes=None)
    among_all = predict(plan, named_transformer("gpt-7b"), slow, workers=64, batch=512)
    assert among.step_s < 0.9 * among_all.step_s  # the same parts of a batch, each of which gathers everything
    state, all_state = (
        one.memory.parameters + one.memory.gradients + one.memory.optimizer for one in (among, among_all)
    )
    assert state == pytest.approx(8 * all_state)
    wanted = search(named_transformer("gpt-7b"), slow, workers=64, batch=512, fixed={"shard_degree": 4})
    assert {(one.plan.shard, one.plan.shard_degree) for one in wanted.ranked} == {("parameters", 4)}


@pytest.mark.long
def test_less_memory_never_makes_a_faster_plan(selene: Network) -> None:
    workload = named_transformer("gpt-7b")
    steps = [
        search(workload, selene, workers=16, batch=16, memory_limit=gib * 2**30).ranked[0].step_s
        for gib in (320, 80, 40, 20)
    ]
    assert steps == sorted(steps)


def test_constraints_are_kept(selene: Network) -> None:
    fixed = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 4, "shard": "optimizer", "recompute": True}
    found = search(named_transformer("gpt-7b"), selene, workers=64, batch=128, fixed=fixed)
    for one in found.ranked:
        assert {name: getattr(one.plan, name) for name in fixed} == fixed


def test_what_neither_layouts_nor_the_search_decide_is_kept_too(selene: Network) -> None:
    workload = transformer(1024, 8, 16, sequence=512)
    fixed = {"embeddings": "row", "priority": False, "compression": "fp16", "pipeline_parallel_degree": 2}
    several = {"stages_per_rank": 2, "pipeline_schedule": "zero_bubble"}
    for more in ({"pipeline_schedule": "interleaved"}, several, {"pipeline_schedule": "zero_bubble_v"}):
        kept = fixed | more
        for one in search(workload, selene, workers=8, batch=32, memory_limit=0, fixed=kept).ranked:
            assert {name: getattr(one.plan, name) for name in kept} == kept
        plans = admissible_plans(workload, selene, workers=8, batch=32, fixed=kept)
        assert plans
        assert all(getattr(plan, name) == value for plan in plans for name, value in kept.items())


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ({"tensor_parallel_degree": 3}, "tensor_parallel_degree: no layer of gpt-7b can be divided among 3 workers"),
        (
            {"pipeline_parallel_degree": 5},
            "pipeline_parallel_degree: 5 does not divide 64 workers; use a divisor, as 4",
        ),
        ({"pipeline_parallel_degree": 64}, "64 stages need as many layers, and gpt-7b has 34"),
        (
            {"spatial_parallel_degree": 2},
            "spatial_parallel_degree: gpt-7b does not say how 2 workers divide its samples",
        ),
        ({"colour": 1}, "colour: a plan has no such field"),
        ({"shard": "all"}, "shard: there is no 'all'"),
        ({"synchronisation": "stale:4"}, "synchronisation: plans are compared by the time of a step"),
        ({"data_parallel_degree": 7}, "7 does not divide 64 workers; use a divisor, as 4"),
        ({"shard_degree": 3}, "shard_degree: 3 does not divide 64 workers; use a divisor, as 2"),
        ({"shard_degree": 1}, "shard_degree: parameters that are sharded among 1 worker are whole on each"),
        ({"shard": "none", "shard_degree": 2}, "shard_degree: says among how many parameters are sharded, and shard"),
    ],
)
def test_a_refusal_names_the_rule(selene: Network, fixed: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        search(named_transformer("gpt-7b"), selene, workers=64, batch=128, fixed=fixed)


def test_what_fits_nowhere_is_refused_with_what_is_missing(selene: Network) -> None:
    with pytest.raises(
        PlanError,
        match=r"the plan that needs least, .*, needs 14.3 GiB on a worker, most of it \(9.31 GiB\) for optimizer, "
        "and there are 14.1 GiB; use more workers, or devices with more than 14.3 GiB$",
    ):
        search(named_transformer("gpt-7b"), selene, workers=8, batch=8, memory_limit=int(14.1 * 2**30))
    state = "state are .*, .* on each of 8 workers if nothing is held twice, and .* 8 GiB"
    with pytest.raises(PlanError, match=f"{state}; use more than 365 workers, or devices with more than 366 GiB$"):
        search(named_transformer("gpt-175b"), selene, workers=8, batch=8, memory_limit=8 * 2**30)
    long = transformer(1024, 2, 16, sequence=2**17, vocabulary=512)
    with pytest.raises(
        PlanError, match="leave shard open, or use smaller samples, as shorter .*, or more workers, or dev"
    ):
        search(long, selene, workers=2, batch=2, memory_limit=3 * 2**30, fixed={"shard": "none"})


def test_a_batch_that_no_degree_divides_is_refused_with_what_can_be_done(selene: Network) -> None:
    refused = r"no degrees of 3 workers go with a batch of 1; use fewer workers, or make the batch larger$"
    with pytest.raises(PlanError, match=refused):
        search(small(), selene, workers=3, batch=1)
    with pytest.raises(PlanError, match="a batch of 1 and tensor_parallel_degree = 1; fix less, or"):
        search(small(), selene, workers=2, batch=1, fixed={"tensor_parallel_degree": 1})


def test_too_many_workers_are_refused(selene: Network) -> None:
    with pytest.raises(PlanError, match="selene-like has places for 3072 workers"):
        search(named_transformer("gpt-7b"), selene, workers=4096, batch=4096)


def test_the_explanation_names_winner_runner_up_and_what_is_to_blame() -> None:
    found, _ = on_1024("gpt-7b", 1024)
    text = explain(found)
    assert found.best.plan.describe() in text
    assert found.others[0].plan.describe() in text
    assert "slower" in text or "cannot be told apart" in text
    rows = plan_rows(found)
    assert rows[0]["why not"] == "chosen"
    said = ("slower", "needs", "within the prediction's error, and less simple")
    assert all(any(words in row["why not"] for words in said) for row in rows[1:])
    assert all(set(row) == {"plan", "step", "80% within", "exposed", "idle", "memory", "why not"} for row in rows)


@pytest.mark.long
def test_the_chosen_plan_is_a_file_with_reasons(selene: Network) -> None:
    found = search(named_transformer("gpt-7b"), selene, workers=64, batch=128)
    plan = with_reasons(found)
    assert Plan.from_toml(plan.to_toml()) == plan
    assert plan.predicted["step_s"] == pytest.approx(found.best.step_s)
    assert "runner-up" in plan.reasons["plan"]


def test_captured_layers_that_cannot_be_divided_are_not() -> None:
    work = (Operation("forward", 1e9, saved_bytes=1e6),)
    layers = tuple(Layer(f"l{i}", "Conv2d", 10**6, 4 * 10**6, 4 * 10**6, 0, 1e5, work, 1e-3, 2e-3) for i in range(6))
    workload = Workload("net", 1, layers)
    where = cluster.load("star:hosts=4,bandwidth=10Gbit/s")
    found = search(workload, where, workers=4, batch=32, constants=Constants(), memory_limit=0)
    assert all(one.plan.tensor_parallel_degree == 1 for one in found.ranked)
    assert found.best.plan.pipeline_parallel_degree == 1


def test_buckets_are_solved_from_the_backward_timeline() -> None:
    # A slow network and much to send: buckets as large as possible wait longest, as small as possible pay latencies.
    work = (Operation("forward", 1e9, saved_bytes=1e6),)
    layers = tuple(Layer(f"l{i}", "x", 10**6, 4 * 10**6, 4 * 10**6, 0, 1e5, work, 2e-2, 4e-2) for i in range(40))
    where = cluster.load("star:hosts=8,bandwidth=1Gbit/s,latency=15us")
    fixed = {"pipeline_parallel_degree": 1, "shard": "none"}
    best = search(Workload("net", 1, layers), where, workers=8, batch=8, fixed=fixed, memory_limit=0).best
    default = predict(Plan(), Workload("net", 1, layers), where, workers=8, batch=8)
    assert best.plan.bucket_bytes is not None
    assert best.step_s < default.step_s
    for size in (2**20, 200 * 2**20):
        other = predict(Plan(bucket_bytes=size), Workload("net", 1, layers), where, workers=8, batch=8)
        assert best.step_s <= other.step_s * (1 + 1e-9)
