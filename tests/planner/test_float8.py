"""Products of linear layers in float8, and what fusion takes away: planned and predicted, never carried out."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket import cluster
from hocket.planner import Constants, Network, Plan, PlanError, Prediction, assumptions, predict, search
from hocket.planner.step._profile import Profile
from hocket.workload import Layer, Operation, Workload, WorkloadError, llama, named_transformer, parse


@functools.cache
def network_of(name: str) -> Network:
    return Network.of(cluster.load(name))


H100 = network_of("h100-like")
LLAMA = named_transformer("llama-3-8b")
NARROW = Plan(precision="float8", shard="parameters")


def predicted(plan: Plan, workload: Workload = LLAMA, **constants: object) -> Prediction:
    told = Constants.of({**H100.reached, **constants})
    return predict(plan, workload, H100, workers=16, batch=16, constants=told)


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(
    hidden=st.sampled_from([128, 1024, 8192]),
    feed_forward=st.sampled_from([64, 4096, 30000]),
    sequence=st.sampled_from([1, 128, 8192]),
    micro=st.sampled_from([0.1, 1.0, 16.0]),
    tensor=st.sampled_from([1, 2, 8]),
    name=st.sampled_from(["h100-like", "h200-like", "b200-like", "mi300x-like"]),
)
def test_no_pass_of_any_layer_is_slower_in_float8(
    hidden: int, feed_forward: int, sequence: int, micro: float, tensor: int, name: str
) -> None:
    workload = llama(hidden, 2, 8, 8, feed_forward, sequence=sequence)
    network = network_of(name)
    plan = Plan(tensor_parallel_degree=tensor, sequence_parallel=tensor > 1)
    constants = Constants.of(network.reached)
    wide, narrow = (Profile(one, network, constants).times(plan, micro) for one in (workload, workload.in_float8()))
    for part in ("forward", "backward", "again", "tensor_forward", "tensor_backward"):
        assert (getattr(narrow, part) <= getattr(wide, part)).all(), part
    assert (narrow.spared == pytest.approx(wide.total - narrow.total, rel=1e-9, abs=1e-15)) or tensor > 1


def test_large_products_take_half_as_long_and_attention_and_output_as_long_as_before() -> None:
    wide, narrow = (
        Profile(one, H100, Constants.of(H100.reached)).times(Plan(), 1.0) for one in (LLAMA, LLAMA.in_float8())
    )
    assert narrow.forward[0] == wide.forward[0]
    assert narrow.forward[-1] == wide.forward[-1]
    rate = H100.flops * Constants.of(H100.reached).matmul_share
    products = sum(one.flops for one in LLAMA.layers[1].operations if one.weight_bytes) / rate
    assert 0.25 * products < wide.forward[1] - narrow.forward[1] < 0.5 * products  # casts take the rest


def test_memory_is_that_of_bfloat16() -> None:
    wide, narrow = (predicted(dataclasses.replace(NARROW, precision=one)) for one in ("bfloat16", "float8"))  # type: ignore[arg-type]
    assert narrow.memory == wide.memory
    assert narrow.parts.optimizer == wide.parts.optimizer


def test_weights_of_linear_layers_are_gathered_in_half_the_bytes() -> None:
    weights = sum(one.weight_bytes for one in LLAMA.layers[1].operations)
    assert weights == LLAMA.layers[1].parameter_bytes - 2 * 2 * 4096  # all but two norms
    narrowed = Profile(LLAMA.in_float8(), H100, Constants.of(H100.reached)).times(NARROW, 1.0).narrowed
    assert narrowed[1] == weights / 2
    assert narrowed[0] == narrowed[-1] == 0
    wide, narrow = (
        predicted(dataclasses.replace(NARROW, precision=one), prefetch=False)  # type: ignore[arg-type]
        for one in ("bfloat16", "float8")
    )
    assert 0.5 < narrow.parts.gather / wide.parts.gather < 0.75
    assert narrow.parts.gradients == pytest.approx(wide.parts.gradients)


def test_all_gathers_of_a_divided_sequence_are_in_float8_and_whole_sums_are_not() -> None:
    for sequence, part in ((True, 0.75), (False, 1.0)):
        plan = Plan(tensor_parallel_degree=8, sequence_parallel=sequence, precision="bfloat16")
        wide, narrow = (predicted(dataclasses.replace(plan, precision=one)) for one in ("bfloat16", "float8"))  # type: ignore[arg-type]
        assert narrow.parts.tensor / wide.parts.tensor == pytest.approx(part, abs=0.03)


@pytest.mark.parametrize("name", ["selene-like", "lassen", "summit"])
def test_devices_without_float8_are_refused_by_name(name: str) -> None:
    with pytest.raises(PlanError, match=f"the devices of {name} compute no products in float8: V100 and A100 cannot"):
        predict(NARROW, named_transformer("gpt-1.7b"), cluster.load(name), workers=8, batch=8)


def test_workloads_that_do_not_say_which_products_are_linear_layers_are_refused() -> None:
    work = (Operation("forward", 1e9, 1e6, 1e6),)
    plain = Workload("mine", 1, (Layer("0", "Block", operations=work),), precision="bfloat16")
    timed = dataclasses.replace(LLAMA, layers=(dataclasses.replace(LLAMA.layers[1], forward_s=1.0, backward_s=2.0),))
    for workload, why in (
        (plain, "nothing says which of its products are linear layers'"),
        (dataclasses.replace(plain, precision="float32"), "it is in float32, and float8 is planned beside bfloat16"),
        (timed, "its times were measured in bfloat16"),
    ):
        with pytest.raises(WorkloadError, match=why):
            predict(NARROW, workload, H100, workers=2, batch=2)


@pytest.mark.long
def test_only_who_asks_for_float8_is_given_a_plan_with_it() -> None:
    for fixed, precision in (({}, "bfloat16"), ({"precision": "fp8"}, "float8"), ({"precision": "float8"}, "float8")):
        found = search(LLAMA, H100, workers=8, batch=16, fixed=fixed, keep=2)
        assert {one.plan.precision for one in found.ranked} == {precision}
    said = {what: (value, basis) for what, value, basis in assumptions(found.best, H100, precision="float8")}
    assert said["float8 products"] == ("60% of 1.979 PFLOP/s, and casts by memory", "assumed")
    assert "planned, not carried out" in said["precision"][0]


def test_what_float8_and_fusion_take_away_makes_an_interval_wider() -> None:
    def wide(one: Prediction) -> float:
        return one.interval_s[1] / one.step_s

    plain = predicted(Plan(precision="bfloat16"))
    assert plain.spared_s == 0
    assert wide(plain) < wide(predicted(Plan(precision="bfloat16"), fused_share=0.6))
    assert wide(plain) < wide(predicted(Plan(precision="float8")))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(0, 0.99), min_size=2, max_size=4))
def test_the_more_is_fused_the_shorter_is_a_step(shares: list[float]) -> None:
    steps = [predicted(Plan(precision="bfloat16"), fused_share=one).step_s for one in sorted(shares)]
    assert steps == sorted(steps, reverse=True)


def test_fusion_takes_its_part_of_kernels_that_only_read_and_write_and_nothing_of_products() -> None:
    for operations, left in (((Operation("norm", 0.0, 1e9, calls=4),), 0.4), ((Operation("product", 1e12, 1e9),), 1.0)):
        workload = Workload("one", 1, (Layer("0", "x", operations=operations),), precision="bfloat16")
        whole, fused = (
            Profile(workload, H100, Constants(fused_share=share)).times(Plan(), 1.0).total for share in (0.0, 0.6)
        )
        assert fused == pytest.approx(whole * left)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_part_of_1_or_more_cannot_be_fused_away(share: float) -> None:
    with pytest.raises(PlanError, match="fused_share"):
        Constants(fused_share=share)


def test_kernels_that_pytorch_launches_one_by_one_are_more_and_read_more() -> None:
    eager = named_transformer("llama-3-8b", eager=True)
    assert parse(str(eager)) == eager
    assert eager.flops == LLAMA.flops
    assert eager.parameter_bytes == LLAMA.parameter_bytes
    plan = Plan(recompute=True, recompute_part="attention", precision="bfloat16")
    one, other = predicted(plan, eager), predicted(plan)
    assert one.parts.compute > other.parts.compute
    assert one.parts.recompute > other.parts.recompute
    assert one.memory.activations == other.memory.activations  # what is kept for backward passes is computed again
    whole = Plan(precision="bfloat16")
    assert predicted(whole, eager).memory.activations > predicted(whole).memory.activations
