"""Closed forms against the simulator, and what changes when a plan changes."""

from __future__ import annotations

import dataclasses

import pytest

from hocket import cluster
from hocket.planner import (
    Constants,
    Network,
    Plan,
    PlanError,
    ScalingFit,
    assumptions,
    fit_scaling,
    plan_order,
    predict,
    step_graph,
)
from hocket.simulate import simulate_step
from hocket.workload import Layer, Operation, Workload, named_transformer

PLAIN = Constants(inside_share=1.0, network_share=1.0, collective_s=0.0)


def chain(layers: int = 8, *, seconds: float = 1e-3, nbytes: int = 4_000_000, output: float = 1e5) -> Workload:
    """Equal layers with measured times, for one sample."""
    work = (Operation("forward", 1e9, saved_bytes=1e6),)
    made = tuple(
        Layer(f"l{i}", "Linear", nbytes // 4, nbytes, nbytes, 2 * nbytes, output, work, seconds, 2 * seconds)
        for i in range(layers)
    )
    return Workload("chain", 1, made, "float32", "by hand")


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("bandwidth", ["1Gbit/s", "10Gbit/s", "100Gbit/s"])
@pytest.mark.parametrize("bucket", [8_000_000, 25 * 2**20])
def test_data_parallel_steps_take_what_the_simulator_says(workers: int, bandwidth: str, bucket: int) -> None:
    where = cluster.load(f"star:hosts={workers},bandwidth={bandwidth},latency=1us")
    plan = Plan(bucket_bytes=bucket)
    graph = step_graph(plan, chain(), where, workers=workers, batch=workers, constants=PLAIN)
    simulated = simulate_step(graph, where).seconds
    found = predict(plan, chain(), where, workers=workers, batch=workers, constants=PLAIN)
    assert found.step_s == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize("heavy", [0, 5, 7])
@pytest.mark.parametrize("bandwidth", ["1Gbit/s", "10Gbit/s"])
def test_a_pipeline_ends_when_the_rank_with_the_most_gradients_has_reduced_them(heavy: int, bandwidth: str) -> None:
    # The first stage computes last, and the one with most of the parameters reduces longest.
    layers = list(chain().layers)
    layers[heavy] = dataclasses.replace(layers[heavy], gradient_bytes=64_000_000)
    workload = dataclasses.replace(chain(output=1e4), layers=tuple(layers))
    where = cluster.load(f"star:hosts=4,bandwidth={bandwidth},latency=1us")
    plan = Plan(pipeline_parallel_degree=2, data_parallel_degree=2, micro_batches=4)
    graph = step_graph(plan, workload, where, workers=4, batch=8, constants=PLAIN)
    simulated = simulate_step(graph, where).seconds
    found = predict(plan, workload, where, workers=4, batch=8, constants=PLAIN)
    assert found.step_s == pytest.approx(simulated, rel=0.05)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro"), [(2, 1), (2, 4), (4, 4), (4, 12)])
def test_pipelines_take_what_the_simulator_says(schedule: str, stages: int, micro: int) -> None:
    where = cluster.load(f"star:hosts={stages},bandwidth=100Gbit/s,latency=1us")
    plan = Plan(pipeline_parallel_degree=stages, micro_batches=micro, pipeline_schedule=schedule)
    workload = chain(output=1e4)
    graph = step_graph(plan, workload, where, workers=stages, batch=micro, constants=PLAIN)
    simulated = simulate_step(graph, where).seconds
    found = predict(plan, workload, where, workers=stages, batch=micro, constants=PLAIN)
    assert found.step_s == pytest.approx(simulated, rel=0.01)
    # Equal stages idle (p - 1)/(m + p - 1) of the time.
    passes = found.step_s - found.parts.optimizer
    assert found.parts.bubble / passes == pytest.approx((stages - 1) / (micro + stages - 1), rel=0.02)


def test_pipeline_and_data_together_take_what_the_simulator_says() -> None:
    where = cluster.load("star:hosts=8,bandwidth=10Gbit/s,latency=1us")
    plan = Plan(pipeline_parallel_degree=2, micro_batches=4)
    graph = step_graph(plan, chain(), where, workers=8, batch=16, constants=PLAIN)
    found = predict(plan, chain(), where, workers=8, batch=16, constants=PLAIN)
    assert found.step_s == pytest.approx(simulate_step(graph, where).seconds, rel=0.05)


def test_1f1b_has_no_more_under_way_than_stages_are_left() -> None:
    plan = Plan(pipeline_parallel_degree=4, micro_batches=8)
    for rank in range(4):
        held = most = 0
        for action in plan_order(plan).ranks[rank]:
            held += 1 if action.kind == "F" else -1
            most = max(most, held)
        assert (held, most) == (0, 4 - rank)


def test_the_parts_sum_to_the_step_and_name_what_is_to_blame() -> None:
    where = cluster.load("star:hosts=8,bandwidth=1Gbit/s")
    found = predict(Plan(), chain(), where, workers=8, batch=8, constants=PLAIN)
    assert sum(seconds for _, seconds in found.parts.rows()) == pytest.approx(found.step_s)
    assert found.parts.blame == "gradients"
    assert found.parts.compute == pytest.approx(8 * 3e-3)


def test_overlap_hides_gradients_and_its_absence_does_not() -> None:
    where = cluster.load("star:hosts=8,bandwidth=100Gbit/s")
    hidden, shown = (
        predict(
            Plan(bucket_bytes=4_000_000),
            chain(),
            where,
            workers=8,
            batch=8,
            constants=dataclasses.replace(PLAIN, overlap=overlap),
        ).parts.gradients
        for overlap in (True, False)
    )
    assert hidden < shown / 5


def test_small_micro_batches_pay_what_does_not_shrink() -> None:
    layers = tuple(dataclasses.replace(one, fixed_share=0.5) for one in chain().layers)
    workload = dataclasses.replace(chain(), layers=layers, batch=8)
    where = cluster.load("star:hosts=1")
    whole, cut = (
        predict(Plan(accumulate=parts), workload, where, workers=1, batch=8, constants=PLAIN).parts.compute
        for parts in (1, 8)
    )
    assert cut == pytest.approx(8 * (0.5 + 0.5 / 8) * whole)


def test_no_pass_is_faster_than_the_host_launches_it() -> None:
    layers = tuple(dataclasses.replace(one, launch_s=1e-3) for one in chain().layers)
    workload = dataclasses.replace(chain(), layers=layers, batch=8)
    where = cluster.load("star:hosts=1")
    whole, half, cut = (
        predict(Plan(accumulate=parts), workload, where, workers=1, batch=8, constants=PLAIN).parts.compute / parts
        for parts in (1, 2, 8)
    )
    assert whole == pytest.approx(sum(one.forward_s + one.backward_s for one in layers))
    assert half == pytest.approx(whole / 2)
    assert cut == pytest.approx(len(layers) * 1e-3)
    assert cut > whole / 8


def test_recomputation_costs_time() -> None:
    where = Network.of(cluster.load("selene-like"))
    workload = named_transformer("gpt-7b")
    parts = {
        how: predict(Plan(**how_plan), workload, where, workers=8, batch=8).parts
        for how, how_plan in {
            "none": {},
            "attention": {"recompute": True, "recompute_part": "attention"},
            "layers": {"recompute": True},
        }.items()
    }
    assert parts["none"].recompute == 0
    assert 0 < parts["attention"].recompute < parts["layers"].recompute / 3
    assert parts["layers"].recompute == pytest.approx(parts["layers"].compute / 3, rel=0.01)


def test_interleaving_divides_the_bubble() -> None:
    where = Network.of(cluster.load("selene-like"))
    workload = named_transformer("gpt-7b")
    plain = Plan(pipeline_parallel_degree=4, micro_batches=8)
    twice = dataclasses.replace(plain, pipeline_schedule="interleaved", stages_per_rank=2)
    one, two = (predict(plan, workload, where, workers=4, batch=8).parts for plan in (plain, twice))
    assert two.bubble == pytest.approx(one.bubble / 2, rel=0.1)
    assert two.messages > one.messages


def test_sharded_parameters_cost_half_as_much_again() -> None:
    # ZeRO: stage 3 moves 3 P where data parallelism moves 2 P.
    where = cluster.load("star:hosts=8,bandwidth=1Gbit/s,latency=0s")
    constants = dataclasses.replace(PLAIN, overlap=False)
    moved = {
        shard: predict(Plan(shard=shard), chain(), where, workers=8, batch=8, constants=constants).parts.exposed
        for shard in ("none", "optimizer", "gradients", "parameters")
    }
    assert moved["optimizer"] == pytest.approx(moved["none"], rel=0.01)
    assert moved["gradients"] == pytest.approx(moved["none"], rel=0.01)
    assert moved["parameters"] == pytest.approx(1.5 * moved["none"], rel=0.01)


def test_more_workers_than_there_are_is_refused() -> None:
    with pytest.raises(PlanError, match="closet has places for 8 workers, and 16 are wanted"):
        predict(Plan(), chain(), cluster.load("closet"), workers=16, batch=16)


def test_a_workload_without_times_needs_a_device_with_a_rate() -> None:
    with pytest.raises(PlanError, match="does not say how fast its devices are"):
        predict(Plan(), named_transformer("gpt-7b"), cluster.load("star:hosts=4"), workers=4, batch=4)


def test_a_split_that_names_no_layer_is_refused() -> None:
    plan = Plan(pipeline_parallel_degree=2, micro_batches=2, split=("nowhere",))
    with pytest.raises(PlanError, match="split: chain has no layer 'nowhere'"):
        predict(plan, chain(), cluster.load("closet"), workers=2, batch=2)


@pytest.mark.parametrize("split", [("block9", "block3"), ("block3", "block3"), ("embedding", "block3")])
def test_a_split_out_of_order_is_refused(split: tuple[str, str]) -> None:
    plan = Plan(pipeline_parallel_degree=3, micro_batches=4, split=split)
    where = cluster.load("selene-like")
    with pytest.raises(PlanError, match=f"split: '{split[0] if split[0] == 'embedding' else 'block3'}' does not come"):
        predict(plan, named_transformer("gpt-7b"), where, workers=3, batch=12)


def test_a_split_may_name_what_holds_layers_as_the_trainer_has_it_and_nothing_inside_of_one() -> None:
    layers = tuple(
        dataclasses.replace(layer, name=name)
        for name, layer in zip(("a.0", "a.1", "b.0", "b.1"), chain(4).layers, strict=True)
    )
    model, where = dataclasses.replace(chain(4), layers=layers), cluster.load("closet")

    def step_s(name: str) -> float:
        plan = Plan(pipeline_parallel_degree=2, micro_batches=2, split=(name,))
        return predict(plan, model, where, workers=2, batch=2).step_s

    assert step_s("b") == step_s("b.0") != step_s("b.1")
    with pytest.raises(PlanError, match="'a' does not come after the layer before it, or begins the model"):
        step_s("a")
    with pytest.raises(PlanError, match="'b.1.up' is inside the layer 'b.1'"):
        step_s("b.1.up")


def test_switches_that_reduce_spare_half_of_the_traffic_of_many() -> None:
    where = Network.of(
        cluster.load("leafspine:leaves=8,ports=8,latency=0s,reduction.streaming=true,reduction.efficiency=1.0")
    )
    ring, tree = (
        where.collective("all_reduce", 1e9, 64, 1, dataclasses.replace(PLAIN, in_network=there))
        for there in (False, True)
    )
    assert tree.algorithm == "aggregation_tree"
    assert ring.seconds / tree.seconds == pytest.approx(2 * 63 / 64, rel=0.01)


def test_a_fit_gives_back_the_constants_of_a_curve() -> None:
    truth = {"a": (0.1, 0.02, 0.004, 0.02), "b": (0.1, 0.05, 0.0, 0.01)}
    curves = {name: ScalingFit(4, *values) for name, values in truth.items()}
    points = {name: {n: one.throughput(n) for n in (1, 2, 4, 8, 16)} for name, one in curves.items()}
    for name, found in fit_scaling(points, 4).items():
        for n in (32, 64, 512):
            assert found.throughput(n) == pytest.approx(curves[name].throughput(n), rel=0.01)


def test_layers_measured_faster_than_the_device_s_peak_have_no_mfu() -> None:
    """It had been 473% of a core that a cluster's file says to make 10 GFLOP/s."""
    measured = chain()
    rates = {flops: cluster.load(f"star:hosts=1,server.flops={flops},server.memory=16GiB") for flops in ("1e18", "1")}
    found = {flops: predict(Plan(), measured, where, workers=1, batch=1) for flops, where in rates.items()}
    assert 0 < found["1e18"].mfu < 1
    assert (found["1"].mfu, found["1"].beyond_peak) == (0.0, True)
    told = {name: value for name, value, _ in assumptions(found["1"], Network.of(rates["1"]), precision="float32")}
    assert "less than was measured" in told["peak"]


def test_a_fit_says_nothing_of_inside_hosts_that_have_one_worker() -> None:
    found = fit_scaling({"a": {1: 10.0, 2: 19.5, 4: 38.0, 8: 70.0}}, 1)["a"]
    assert found.inside_s == 0.0
    assert ("inside hosts, ms per sample", "one worker a host") in found.table()


def test_too_few_points_are_refused() -> None:
    with pytest.raises(PlanError, match="measure at least four"):
        fit_scaling({"a": {1: 10.0, 2: 19.0}}, 4)
    with pytest.raises(PlanError, match="b: 1 measured points"):
        fit_scaling({"a": {1: 10.0, 2: 19.0, 4: 36.0, 8: 70.0, 16: 130.0}, "b": {1: 10.0}}, 4)


def test_a_curve_is_no_surer_than_its_points_are_near_it() -> None:
    """One that missed them by 5% had been sure to 2%."""
    rates = ScalingFit(4, 0.1, 0.02, 0.004, 0.02)
    points = {n: rates.throughput(n) * (1.05 if n in (2, 8) else 0.95) for n in (1, 2, 4, 8, 16, 32)}
    rough = fit_scaling({"a": points}, 4)["a"]
    near = fit_scaling({"a": {n: rates.throughput(n) for n in points}}, 4)["a"]
    assert near.off < 0.005 < 0.03 < rough.off
    widths = [high / low for low, high in (one.interval(8) for one in (near, rough))]
    assert widths[0] < 1.06 < 1.08 < widths[1]


@pytest.mark.parametrize("points", [{1: 1.0, 2: 4.0, 4: 16.0, 8: 64.0}, {1: 10.0, 2: 5.0, 4: 2.0, 8: 1.0}])
def test_points_that_no_curve_comes_near_are_refused(points: dict[int, float]) -> None:
    """Faster than the workers grow, or slower than one: the curve was off by 600%, and sure to 2%."""
    with pytest.raises(PlanError, match="a: the nearest curve of these constants is off by"):
        fit_scaling({"a": points}, 4)


def test_a_column_of_one_host_says_nothing_of_several() -> None:
    one = ScalingFit(4, 0.1, 0.02, 0.004, 0.02)
    points = {
        name: {n: one.throughput(n) for n in counts} for name, counts in (("a", (1, 2, 4, 8, 64)), ("b", (1, 2, 3)))
    }
    found = fit_scaling(points, 4)
    assert (found["a"].fitted_workers, found["b"].fitted_workers) == (64, 3)
    assert found["b"].throughput(4) == pytest.approx(one.throughput(4), rel=0.02)
    assert dict(found["b"].table())["between hosts, ms per sample"] == "not measured"
    with pytest.raises(PlanError, match="5 workers are on several hosts.*ask for at most 4"):
        found["b"].throughput(5)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("kernel_s", 4.0, "it is seconds"),
        ("jitter", "2", "0.01 for 1%"),
        ("kernel_s", "fast", "as 4us"),
        ("overlap", "maybe", "true or false"),
        ("jitter", True, "a number"),
        ("jiter", 0.1, "is no constant; there are"),
    ],
)
def test_a_constant_in_the_wrong_unit_is_refused(name: str, value: object, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Constants.of({name: value})


def test_a_constant_that_is_a_time_may_have_a_unit() -> None:
    assert Constants.of({"kernel_s": "4 us", "collective_s": "0.00001"}).kernel_s == 4e-6
