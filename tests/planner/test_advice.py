"""Stages that the search names by all that they do: exchange, update and memory, not computation alone."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from hocket.cluster import Cluster, load
from hocket.planner import SPLIT_REASON, Constants, Plan, PlanError, predict, search, step_graph, with_reasons
from hocket.simulate import simulate_step
from hocket.workload import Layer, Operation, Workload

PLAIN = Constants(inside_share=1.0, network_share=1.0, collective_s=0.0)
SLOW = "star:hosts=4,bandwidth=10Gbit/s,latency=2us,server=host,server.flops=1e12,server.ranks=1,server.memory=64GiB"


def chain(rows: list[tuple[float, float, float]]) -> Workload:
    """A measured chain: milliseconds of both passes, MB of parameters and of activations of each layer."""
    layers = []
    for index, (ms, weights, saved) in enumerate(rows):
        count, seconds = round(weights * 0.25e6), ms / 3e3
        work = (Operation("forward", seconds * 1e12, saved_bytes=saved * 1e6),)
        sizes = (count, 4 * count, 4 * count, 8 * count)
        layers.append(Layer(f"layer{index}", "layer", *sizes, 1e4, work, seconds, 2 * seconds))
    return Workload("chain", 1, tuple(layers), "float32", "by hand")


def found(workload: Workload, where: Cluster, batch: int, limit: int = 0, **fixed: Any) -> Plan:
    return search(
        workload, where, workers=where.world, batch=batch, constants=PLAIN, memory_limit=limit, fixed=fixed
    ).best.plan


def step(plan: Plan, workload: Workload, where: Cluster, batch: int) -> float:
    return predict(plan, workload, where, workers=where.world, batch=batch, constants=PLAIN, memory_limit=0).step_s


# The last four layers hardly compute and have nearly all parameters, which 10 Gbit/s carries at 1.25 MB a ms.
LATE = chain([(4, 0.1, 0.1)] * 6 + [(1, 12, 0.1)] * 4)
PIPED: dict[str, Any] = {"pipeline_parallel_degree": 2, "micro_batches": 4, "stages_per_rank": 1}


@pytest.mark.parametrize("shard", ["none", "gradients", "parameters"])
def test_stages_are_cut_where_the_step_is_shortest_with_what_they_exchange(shard: str) -> None:
    where = load(SLOW)
    plain = Plan(**PIPED, shard=shard)
    best = found(LATE, where, 8, **PIPED, shard=shard)
    names = [layer.name for layer in LATE.layers]
    every = [step(dataclasses.replace(plain, split=(name,)), LATE, where, 8) for name in names[1:]]
    assert step(best, LATE, where, 8) <= 1.03 * min(every)
    assert step(best, LATE, where, 8) < 0.94 * step(plain, LATE, where, 8), best.split
    both = [
        simulate_step(step_graph(one, LATE, where, workers=4, batch=8, constants=PLAIN), where).seconds
        for one in (best, plain)
    ]
    assert both[0] < 0.94 * both[1]


def test_stages_that_do_not_fit_as_they_compute_are_cut_so_that_they_fit() -> None:
    # The first layers keep 100 MB each of a micro-batch, of which 4 are under way on the first rank.
    where = load(SLOW)
    heavy = chain([(1, 1, 100)] * 8 + [(1, 1, 1)] * 8)
    fixed = {**PIPED, "pipeline_parallel_degree": 4, "micro_batches": 8, "recompute": False}
    whole = predict(Plan(**fixed), heavy, where, workers=4, batch=8, constants=PLAIN).memory.total
    assert not found(heavy, where, 8, **fixed).split
    limit = round(whole - 150e6)
    best = found(heavy, where, 8, limit, **fixed)
    assert best.split[0] in ("layer1", "layer2", "layer3")
    assert predict(best, heavy, where, workers=4, batch=8, constants=PLAIN).memory.total <= limit
    with pytest.raises(PlanError, match="needs"):
        found(heavy, where, 8, round(whole / 3), **fixed)


def test_interleaved_stages_are_named_if_they_are_better_and_ranks_take_alike() -> None:
    where = load(SLOW)
    unlike = chain([(1 + 3 * (index % 3 == 0), 0.1, 0.1) for index in range(12)])
    fixed = {**PIPED, "stages_per_rank": 3, "pipeline_schedule": "interleaved", "micro_batches": 8}
    plain, best = Plan(**fixed), found(unlike, where, 16, **fixed)
    assert step(best, unlike, where, 16) <= step(plain, unlike, where, 16)


def test_like_layers_and_given_stages_stay_as_they_are() -> None:
    where = load(SLOW)
    alike = chain([(2, 0.1, 0.1)] * 8)
    for shard, stages in itertools.product(("none", "parameters"), (1, 2)):
        fixed = {**PIPED, "shard": shard, "stages_per_rank": stages}
        assert not found(alike, where, 8, **fixed).split
    given = ("layer2",)
    searched = search(LATE, where, workers=4, batch=8, constants=PLAIN, memory_limit=0, fixed={**PIPED, "split": given})
    assert searched.best.plan.split == given
    assert "split" not in with_reasons(searched).reasons


def test_a_plan_file_says_why_its_stages_are_named_and_a_plan_without_names_is_cut_by_computation() -> None:
    where = load(SLOW)
    fixed = {**PIPED, "shard": "parameters"}
    searched = search(LATE, where, workers=4, batch=8, constants=PLAIN, memory_limit=0, fixed=fixed)
    written = with_reasons(searched)
    assert written.reasons["split"] == SPLIT_REASON
    assert Plan.from_json(written.to_json()).split == searched.best.plan.split
    plain = predict(Plan(**fixed), LATE, where, workers=4, batch=8, constants=PLAIN)
    assert plain.cuts in ((3,), (4,))
