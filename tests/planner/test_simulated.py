"""The closed form against the simulator on random clusters and models: every rank, every link, every message."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket import cluster
from hocket.planner import Constants, Network, Plan, predict, step_graph
from hocket.simulate import simulate_step
from hocket.workload import Layer, Operation, Workload, transformer

FOLDER = Path(__file__).parents[2] / "benchmarks" / "predictions"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("simulated")
    finally:
        sys.path.remove(str(FOLDER))


def apart(study: ModuleType, seed: int, layouts: int) -> list[tuple[float, str]]:
    """How far the closed form is from the simulator, the farthest last."""
    found = [
        (each.step_s / seconds - 1, each.plan.describe()) for each, seconds in study.compared(study.case(seed), layouts)
    ]
    assert len(found) >= layouts
    return sorted(found, key=lambda one: abs(one[0]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [0, 3])
def test_the_first_layouts_take_what_the_simulator_says(study: ModuleType, seed: int) -> None:
    # Both count the same work on the same links; what remains is who shares them when.
    assert abs(apart(study, seed, 8)[-1][0]) < 0.10


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12])
def test_layouts_on_random_clusters_take_what_the_simulator_says(study: ModuleType, seed: int) -> None:
    assert abs(apart(study, seed, 8)[-1][0]) < 0.10


def apart_of(study: ModuleType, seed: int, plan: Plan) -> float:
    """How far the closed form is from the simulator for one plan of a seed's case."""
    one, where = study.case(seed), study.case(seed).where
    more = {"workers": one.workers, "batch": one.batch, "constants": study.PLAIN}
    graph = step_graph(plan, one.workload, where, **more)
    graph.memory_nbytes = None
    return predict(plan, one.workload, where, **more).step_s / simulate_step(graph, where).seconds - 1


def test_a_gather_inside_a_host_does_not_wait_for_copies_that_average_between_hosts(study: ModuleType) -> None:
    # 7 Gbit/s between the hosts of this case: behind each other the step would take 28% longer.
    assert apart_of(study, 709, Plan(shard="parameters", shard_degree=2)) == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("seed", "stages"), [(703, 3), (703, 4), (11, 4), (11, 6), (709, 6)])
def test_gathers_share_ports_with_messages_and_other_stages(study: ModuleType, seed: int, stages: int) -> None:
    plan = Plan(
        shard="parameters", pipeline_parallel_degree=2, stages_per_rank=stages, micro_batches=2,
        pipeline_schedule="interleaved",
    )  # fmt: skip
    assert abs(apart_of(study, seed, plan)) < 0.1


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "pipeline", "stages", "parts", "tensor"),
    [
        (851, 2, 4, 2, 1),  # two devices of a socket gather, and send over the bus between the sockets
        (514, 2, 1, 2, 4),  # a tapered level
        (522, 4, 3, 4, 1),  # a BiGraph
        pytest.param(825, 8, 1, 8, 1, marks=pytest.mark.long),  # a tapered leaf-spine
        pytest.param(856, 4, 1, 4, 1, marks=pytest.mark.long),  # eight ranks share a port
    ],
)
def test_messages_that_are_held_back_elsewhere_leave_most_of_a_port_to_gathers(
    study: ModuleType, seed: int, pipeline: int, stages: int, parts: int, tensor: int
) -> None:
    # With half of the port for each of them the steps would take 12 to 16% longer.
    plan = Plan(
        shard="parameters", pipeline_parallel_degree=pipeline, stages_per_rank=stages, micro_batches=parts,
        tensor_parallel_degree=tensor, sequence_parallel=tensor > 1,
        pipeline_schedule="interleaved" if stages > 1 else "1f1b",
    )  # fmt: skip
    assert abs(apart_of(study, seed, plan)) < 0.08


def test_a_stage_s_groups_across_hosts_are_looked_at_as_they_talk_alone(study: ModuleType) -> None:
    # Groups of 12 on hosts of 8 overlap their steps as much alone as beside the other stage's: 13% less otherwise.
    plan = Plan(shard="gradients", pipeline_parallel_degree=2, micro_batches=2, pipeline_schedule="1f1b")
    assert abs(apart_of(study, 14, plan)) < 0.05


def test_gathers_do_not_wait_for_a_stage_s_message(study: ModuleType) -> None:
    # The second block of a stage is gathered before the first one's message is there: 16% more otherwise.
    plan = Plan(shard="parameters", pipeline_parallel_degree=2, micro_batches=2, pipeline_schedule="1f1b")
    assert abs(apart_of(study, 14, plan)) < 0.05


def test_groups_that_lie_on_switches_in_different_ways_do_not_stay_in_step(study: ModuleType) -> None:
    # Three hosts, two of them at one switch: step by step the hashed paths meet less, and a step takes 15% less.
    assert abs(apart_of(study, 834, Plan())) < 0.1


def test_pipelines_whose_messages_pass_unlike_links_do_not_stay_in_step(study: ModuleType) -> None:
    # On a BiGraph: with all four of them at once on the busiest links the step would take 18% longer.
    plan = Plan(
        shard="gradients", pipeline_parallel_degree=4, stages_per_rank=3, micro_batches=8,
        pipeline_schedule="interleaved",
    )  # fmt: skip
    assert apart_of(study, 522, plan) == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("seed", [14, 28])
def test_stages_that_wait_for_the_pipeline_to_fill_leave_a_host_s_ports_to_others(study: ModuleType, seed: int) -> None:
    # Groups of 12 and of 3 ranks on hosts of 8 and of 2: both stages gather through the host in the middle.
    plan = Plan(shard="parameters", pipeline_parallel_degree=2, micro_batches=2)
    assert abs(apart_of(study, seed, plan)) < 0.1


def test_a_rank_that_is_done_early_reduces_while_others_leave_it_the_links(study: ModuleType) -> None:
    # Groups of three ranks on hosts of two: both stages reduce through the host in the middle, but not all the time.
    plan = Plan(
        pipeline_parallel_degree=2, stages_per_rank=2, micro_batches=2, pipeline_schedule="interleaved"
    )  # fmt: skip
    assert apart_of(study, 709, plan) == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(
    ("shard", "among"), [("none", 0), ("optimizer", 0), ("gradients", 0), ("parameters", 0), ("parameters", 2)]
)
@pytest.mark.parametrize(("pipeline", "stages"), [(1, 1), (2, 1), (2, 2)])
def test_what_the_constants_say_is_not_reached_is_in_both(shard: str, among: int, pipeline: int, stages: int) -> None:
    where = cluster.load(
        "star:hosts=4,bandwidth=40Gbit/s,latency=2us,server=dgx-a100,server.devices=2,server.flops=2e14"
    )
    usual = Constants.of({"fetch_share": 0.5, "network_share": 0.7, "jitter": 0.02})
    plan = Plan(
        pipeline_parallel_degree=pipeline, stages_per_rank=stages, micro_batches=4 if pipeline > 1 else 1,
        pipeline_schedule="interleaved" if stages > 1 else "1f1b", shard=shard, shard_degree=among,
    )  # fmt: skip
    workload = transformer(1024, 8, 16, sequence=512)
    found = predict(plan, workload, where, workers=8, batch=64, constants=usual)
    simulated = simulate_step(step_graph(plan, workload, where, workers=8, batch=64, constants=usual), where).seconds
    assert found.step_s == pytest.approx(simulated, rel=0.05)


@pytest.mark.parametrize("shard", ["none", "gradients", "parameters"])
def test_where_nothing_overlaps_both_say_so(shard: str) -> None:
    where = cluster.load(
        "star:hosts=4,bandwidth=200Gbit/s,latency=2us,server=dgx-a100,server.devices=1,server.flops=2e14"
    )
    workload, took = transformer(1024, 8, 16, sequence=2048), []
    for overlap in (True, False):
        constants = dataclasses.replace(Constants.of({}), jitter=0.0, host_jitter=0.0, overlap=overlap)
        plan = Plan(shard=shard)
        found = predict(plan, workload, where, workers=4, batch=16, constants=constants)
        graph = step_graph(plan, workload, where, workers=4, batch=16, constants=constants)
        took.append(found.step_s)
        assert found.step_s == pytest.approx(simulate_step(graph, where).seconds, rel=0.05)
    assert took[1] > 1.05 * took[0]


def test_groups_that_straddle_hosts_are_priced_by_the_links_they_use() -> None:
    # Pairs of a group of six on hosts of four: one group lies in two hosts, and both share the second host's port.
    where = cluster.load("star:hosts=3,bandwidth=10Gbit/s,latency=1us,server=dgx-a100,server.devices=4")
    network, plain = Network.of(where), Constants(inside_share=1.0, network_share=1.0, collective_s=0.0)
    inside = network.collective("all_reduce", 1e8, 4, 1, plain).seconds
    straddling = network.collective("all_reduce", 1e8, 6, 1, plain).seconds
    assert straddling > 10 * inside


def test_groups_of_stages_that_lie_unlike_on_hosts_reduce_by_one_algorithm() -> None:
    """Ten ranks on hosts of eight: the first stage has 8 + 2, for which rails of two are faster, the second 6 + 4."""
    where = cluster.load("star:hosts=3,bandwidth=60Gbit/s,server=dgx-a100")
    plain = Constants(inside_share=1.0, network_share=1.0, collective_s=0.0)
    plan = Plan(pipeline_parallel_degree=2, micro_batches=4, bucket_bytes=10**8)
    more = {"workers": 20, "batch": 40, "constants": plain}
    workload = transformer(512, 4, 8, sequence=128, vocabulary=64000)
    graph = step_graph(plan, workload, where, **more)
    graph.memory_nbytes = None
    assert predict(plan, workload, where, **more).step_s == pytest.approx(simulate_step(graph, where).seconds, rel=0.02)


def test_paths_that_meet_are_counted_and_measured_clusters_are_not_counted_twice() -> None:
    spec = "leafspine:leaves=4,ports=4,spines=1,bandwidth=10Gbit/s,latency=1us"
    wide, tapered = cluster.load(spec.replace("spines=1", "spines=16")), cluster.load(spec)
    plain = Constants(inside_share=1.0, network_share=1.0, collective_s=0.0)
    seconds = [Network.of(one).collective("all_reduce", 1e8, 4, 4, plain).seconds for one in (wide, tapered)]
    assert seconds[1] > 3.5 * seconds[0]  # four groups, a member of each at every leaf, and one way up
    measured = cluster.load(f"{spec},reached.network_share=0.9")
    assert Network.of(measured).contention is None


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Plan, Workload, str]:
    """A pipeline whose stages are copied, an unlike chain of layers for it, and hosts with slow links."""
    p, d, rounds = draw(st.sampled_from([2, 4])), draw(st.sampled_from([2, 3])), draw(st.integers(1, 3))
    order, v = draw(
        st.sampled_from([("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 3)])
    )
    numbers = st.floats(0.2, 2.0)
    # In units of a link's second: gradients and messages that take about as long as computation.
    sizes, output = draw(st.floats(0.1, 2.0)) * 1e6, draw(st.floats(0.01, 0.5)) * 1e6 / v
    layers = []
    for index in range(p * v + draw(st.integers(0, 3))):
        seconds, parameters = 0.05 * draw(numbers), round(sizes * draw(numbers))
        work = (Operation("forward", seconds * 1e12, saved_bytes=1e6),)
        layers.append(
            Layer(
                f"layer{index}", "layer", parameters, 4 * parameters, 4 * parameters, 8 * parameters, output, work,
                seconds, 2 * seconds, 0.0,
            )
        )  # fmt: skip
    plan = Plan(
        data_parallel_degree=d, pipeline_parallel_degree=p, stages_per_rank=v, micro_batches=p * rounds,
        pipeline_schedule=order, shard=draw(st.sampled_from(["none", "optimizer", "gradients"])),
        bucket_bytes=draw(st.sampled_from([None, 10**6, 10**7])),
    )  # fmt: skip
    where = f"star:hosts={p * d},bandwidth={draw(st.sampled_from([100, 300]))}Mbit/s,server=host,server.flops=1e12"
    return plan, Workload("chain", 1, tuple(layers), "float32", "by hand"), where


@pytest.mark.long
@settings(max_examples=60)
@given(pipelines())
def test_pipelines_between_slow_hosts_take_what_the_simulator_says(drawn: tuple[Plan, Workload, str]) -> None:
    plan, workload, spec = drawn
    where, plain = cluster.load(spec), Constants(inside_share=1.0, network_share=1.0, collective_s=0.0)
    workers = plan.data_parallel_degree * plan.pipeline_parallel_degree
    batch = plan.data_parallel_degree * plan.micro_batches
    graph = step_graph(plan, workload, where, workers=workers, batch=batch, constants=plain)
    found = predict(plan, workload, where, workers=workers, batch=batch, constants=plain)
    assert found.step_s == pytest.approx(simulate_step(graph, where).seconds, rel=0.02)


@pytest.mark.parametrize(("order", "stages"), [("1f1b", 1), ("interleaved", 2)])
def test_no_gradient_of_a_pipeline_is_reduced_before_its_rank_is_done(order: str, stages: int) -> None:
    where = cluster.load("star:hosts=4,bandwidth=1Gbit/s,server=dgx-a100,server.devices=1")
    plan = Plan(
        pipeline_parallel_degree=2, stages_per_rank=stages, micro_batches=4, pipeline_schedule=order,
        bucket_bytes=10**7,
    )  # fmt: skip
    timing = simulate_step(step_graph(plan, transformer(512, 8, 8, sequence=256), where, workers=4, batch=16), where)
    for rank in range(4):
        spans = [one for one in timing.timeline.spans if one.rank == rank]
        passes = max(
            one.end_s for one in spans if one.stream == "compute" and "ward" in one.name or one.stream == "send"
        )
        reductions = [one for one in spans if one.name.startswith("gradients")]
        assert len(reductions) > 1
        assert min(one.start_s for one in reductions) >= passes
