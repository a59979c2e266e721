"""Tensor plans of captured models: what a rank holds, does and exchanges, and what is admissible."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hocket import cluster
from hocket.parallel.pipeline import in_steps
from hocket.planner import (
    Constants,
    Network,
    Plan,
    PlanError,
    Prediction,
    Profile,
    admissible_plans,
    memory_of,
    predict,
    search,
)
from hocket.workload import Exchange, Layer, Workload, WorkloadError, WorkloadStep, capture, parse, refined

BATCH, WIDTH = 8, 64
PAIRS = 3


def blocks() -> nn.Module:
    """Pairs of layers that are cut together, with norms between them that stay whole."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(PAIRS)
        )
    )


@pytest.fixture(scope="module")
def captured() -> Workload:
    """With times that are round: a capture's own vary."""
    found = capture(blocks(), torch.zeros(BATCH, WIDTH), device="meta", degrees=(2, 4))
    seconds = {"LayerNorm": 1e-3, "Linear": 4e-3, "GELU": 1e-3}
    layers = tuple(
        dataclasses.replace(layer, forward_s=seconds[layer.kind], backward_s=2 * seconds[layer.kind])
        for layer in found.layers
    )
    return dataclasses.replace(found, layers=layers)


@pytest.fixture(scope="module")
def network() -> Network:
    return Network.of(cluster.load("star:hosts=4,bandwidth=10Gbit/s,latency=10us"))


def test_memory_divides_what_the_trainer_divides_and_repeats_the_rest(captured: Workload) -> None:
    cut = PAIRS * (2 * 4 * WIDTH * WIDTH + 4 * WIDTH) * 4  # both matrices and the first one's bias
    whole = PAIRS * (WIDTH + 2 * WIDTH) * 4  # the second one's bias, and the norm
    assert captured.parameter_bytes == cut + whole
    inner, outer = 4 * PAIRS * BATCH * WIDTH * 4, PAIRS * BATCH * WIDTH * 4
    for degree in (2, 4):
        found = memory_of(Plan(tensor_parallel_degree=degree).resolve(degree), captured, batch=BATCH)
        assert found.parameters == found.gradients == cut / degree + whole
        assert found.optimizer == 2 * (cut / degree + whole)
        # GELU's input and its output are divided; the norms' inputs, but for the batch, and outputs are not, nor are
        # their means and deviations.
        assert found.activations == 2 * inner / degree + 2 * outer - outer / PAIRS + PAIRS * BATCH * 2 * 4


def test_exchanges_are_synchronous_one_each_way_a_pair_and_grow_with_the_micro_batch(
    captured: Workload, network: Network
) -> None:
    constants = Constants(exchange_s=1e-4)
    each = BATCH * WIDTH * 4
    assert [one for layer in captured.layers for one in layer.share(2).exchanges] == PAIRS * [
        Exchange("backward", "all_reduce", each),
        Exchange("forward", "all_reduce", each),
    ]
    for batch, parts in ((BATCH, 1), (4 * BATCH, 1), (4 * BATCH, 4)):
        plan = Plan(tensor_parallel_degree=2, data_parallel_degree=1, accumulate=parts)
        found = predict(plan, captured, network, workers=2, batch=batch, constants=constants)
        nbytes = each * batch / BATCH / parts
        one = network.collective("all_reduce", nbytes, 2, 1, constants).seconds + 1e-4
        assert found.parts.tensor == pytest.approx(parts * PAIRS * 2 * one)


def test_what_is_not_the_wires_of_an_exchange_is_slowed_as_computation_is(captured: Workload, network: Network) -> None:
    shared = dataclasses.replace(network, at_once=2.0)  # of four: all together take twice as long
    constants = Constants(exchange_s=4e-3, exchange_share=0.5)
    profile = Profile(captured, shared, constants)
    plan = Plan(tensor_parallel_degree=2, pipeline_parallel_degree=2, micro_batches=2).resolve(4)
    times = profile.times(plan, BATCH)
    wire = shared.collective("all_reduce", BATCH * WIDTH * 4, 2, 1, constants).seconds
    half = shared.collective("all_reduce", 2 * BATCH * WIDTH * 4, 2, 1, constants).seconds  # twice the bytes in effect
    assert times.wire_forward.sum() == pytest.approx(PAIRS * wire)
    assert times.tensor_forward.sum() == pytest.approx(PAIRS * (half + 4e-3))
    alone = times.unhindered(2.0)
    assert alone.tensor_backward.sum() == pytest.approx(PAIRS * (wire + (half + 4e-3 - wire) / 2))
    # Of two stages one begins and one ends alone: there exchanges take half of what they do while both are at work.
    with_them, without = (
        predict(plan, captured, shared, workers=4, batch=2 * BATCH, constants=one)
        for one in (constants, Constants(exchange_share=1.0))
    )
    hindered = float(times.tensor_forward.sum() + times.tensor_backward.sum() - 2 * PAIRS * wire)
    added = with_them.step_s - without.step_s
    assert hindered < added < 1.5 * hindered  # two micro-batches of half the model; were nobody alone, 1.5


def test_ranks_that_go_in_step_wait_longer_the_more_they_are(captured: Workload, network: Network) -> None:
    def added(plan: Plan, **costs: float) -> float:
        """Seconds that some costs add to a step."""
        each = (Constants(prefetch=False, **one) for one in (costs, {}))
        there, without = (
            predict(plan, captured, network, workers=4, batch=4 * BATCH, constants=one).step_s for one in each
        )
        return there - without

    exchanges, holders = 2 * PAIRS, 3 * PAIRS
    for plan, waiting in (
        (Plan(tensor_parallel_degree=2), 1.0),  # two and two
        (Plan(tensor_parallel_degree=4), 1.5),
        (Plan(tensor_parallel_degree=2, shard="parameters"), 1.5),  # each of two exchanges waits for one of the others
    ):
        assert added(plan, exchange_s=1e-3) == pytest.approx(exchanges * 1e-3 * waiting)
    assert added(Plan(shard="parameters"), block_s=1e-3) == pytest.approx(holders * 1e-3 * 1.5)
    assert added(Plan(shard="parameters", tensor_parallel_degree=2), block_s=1e-3) == pytest.approx(holders * 1.5e-3)


def test_ranks_wait_longer_at_blocks_that_they_compute_for_longer(captured: Workload, network: Network) -> None:
    waits, plan = (
        Constants(prefetch=False, block_wait_s=1e-3, block_computed_s=2e-3),
        Plan(shard="parameters").resolve(4),
    )
    held = [layer.parameters > 0 for layer in captured.layers]
    for times_as_long in (1.0, 0.05):
        layers = [
            dataclasses.replace(one, forward_s=one.forward_s * times_as_long, backward_s=one.backward_s * times_as_long)
            for one in captured.layers
        ]
        workload = dataclasses.replace(captured, layers=tuple(layers))
        there, without = (
            predict(plan, workload, network, workers=4, batch=4 * BATCH, constants=one)
            for one in (waits, Constants(prefetch=False))
        )
        times = Profile(workload, network, waits).times(plan, BATCH)
        computed_s = (times.forward + times.backward)[held]
        assert (computed_s > 2e-3).all() if times_as_long == 1.0 else (computed_s < 2e-3).all()
        drifted = float(np.minimum(1.0, computed_s / 2e-3).sum())
        assert there.step_s - without.step_s == pytest.approx(1.5e-3 * drifted)


def test_a_layer_that_a_pipeline_cuts_is_gathered_by_both_its_ranks(network: Network) -> None:
    layers = tuple(
        Layer(name, "Block", 100, 400, 400, 800, 64.0, forward_s=seconds, backward_s=2 * seconds)
        for name, seconds in (("small", 2e-3), ("large", 6e-3))
    )
    steps = [
        WorkloadStep(f"{name}_{half}", f"{name}.{half}", 1.0, 1.0, 64, 50, 1)
        for name in ("small", "large")
        for half in "ab"
    ]
    whole = Workload("two layers", BATCH, layers)
    taken_apart = refined(whole, steps)
    plan = Plan(pipeline_parallel_degree=2, data_parallel_degree=2, micro_batches=2, shard="parameters")

    def found(workload: Workload, **costs: float) -> Prediction:
        return predict(plan, workload, network, workers=4, batch=4 * BATCH, constants=Constants(**costs))

    cut, uncut = found(taken_apart), found(whole)
    assert (cut.cuts, uncut.cuts) == ((3,), (1,))
    assert cut.parts.compute == pytest.approx(2 * (6e-3 + 9e-3))
    assert uncut.parts.compute == pytest.approx(2 * 18e-3)
    for workload, blocks in ((taken_apart, 2), (whole, 1)):  # the first rank has the small one and half of the large
        there = found(workload, block_s=1e-3).parts.overhead - found(workload).parts.overhead
        assert there == pytest.approx(2 * blocks * 1.25e-3)  # two ranks, and half as much for the other stage
    assert cut.memory.parameters == (400 + 200) / 2
    assert cut.memory.buffers == 2 * 400 + 2 * 600 + 4 * 64  # two of the small one, gradients, messages


def test_sharded_gradients_cost_more_the_more_often_they_are_reduced(captured: Workload, network: Network) -> None:
    constants = Constants(optimizer_shard_s=5e-3, gradient_shard_s=2e-3)
    for shard, parts, cost in (
        ("none", 4, 0.0),
        ("optimizer", 4, 5e-3),
        ("gradients", 1, 5e-3),
        ("gradients", 4, 11e-3),
    ):
        plan = Plan(shard=shard, accumulate=parts)
        found = predict(plan, captured, network, workers=4, batch=16 * BATCH, constants=constants)
        assert found.parts.overhead == pytest.approx(1.5 * cost)  # four ranks wait longer than two


def test_stages_wait_for_each_other_s_blocks_and_ranks_that_share_tensors_for_sharded_states(
    captured: Workload, network: Network
) -> None:
    def added(plan: Plan, **costs: float) -> float:
        each = (Constants(prefetch=False, **one) for one in (costs, {}))
        there, without = (
            predict(plan, captured, network, workers=4, batch=4 * BATCH, constants=one).parts.overhead for one in each
        )
        return there - without

    plan = Plan(shard="parameters", pipeline_parallel_degree=2, micro_batches=2)
    blocks = max(
        sum(layer.parameters > 0 for layer in stage)
        for stage in captured.stages(predict(plan, captured, network, workers=4, batch=4 * BATCH).cuts)
    )
    assert added(plan, block_s=1e-3) == pytest.approx(2 * blocks * 1.25e-3)  # as if they were 2 x sqrt(2)
    assert added(Plan(shard="optimizer", tensor_parallel_degree=2), optimizer_shard_s=1e-3) == pytest.approx(1.5e-3)


def test_messages_reach_a_share_of_the_link(captured: Workload, network: Network) -> None:
    plan = Plan(pipeline_parallel_degree=4, micro_batches=4)

    def found(rate_Bps: float, share: float) -> Prediction:
        slow = dataclasses.replace(network, host_Bps=rate_Bps, rank_Bps=rate_Bps)
        constants = Constants(message_share=share, step_s=1e-3)
        return predict(plan, captured, slow, workers=4, batch=4 * BATCH, constants=constants)

    whole, half, slower = found(1e6, 1.0), found(1e6, 0.5), found(5e5, 1.0)
    assert whole.cuts == half.cuts == slower.cuts
    # Half of a link is a link of half the rate. What computation hides of a message does not double with it.
    assert half.parts == slower.parts
    latency = 6 * 4 * network.between_s  # of the worst rank: it has two neighbours, and four micro-batches
    assert half.parts.messages >= 2 * whole.parts.messages - 2 * latency
    assert half.parts.compute == whole.parts.compute


def test_computing_again_exchanges_again(captured: Workload, network: Network) -> None:
    plan = Plan(tensor_parallel_degree=2, data_parallel_degree=1)
    again = Plan(tensor_parallel_degree=2, data_parallel_degree=1, recompute=True)
    one, other = (predict(each, captured, network, workers=2, batch=BATCH).parts.tensor for each in (plan, again))
    assert other == pytest.approx(1.5 * one)


def test_a_rank_computes_its_share_of_what_is_divided_and_all_of_the_rest(captured: Workload, network: Network) -> None:
    whole = predict(Plan(), captured, network, workers=1, batch=BATCH).parts.compute
    two = predict(Plan(tensor_parallel_degree=2), captured, network, workers=2, batch=BATCH).parts.compute
    four = predict(Plan(tensor_parallel_degree=4), captured, network, workers=4, batch=BATCH).parts.compute
    assert whole == pytest.approx(PAIRS * 30e-3)
    assert two == pytest.approx(PAIRS * (27e-3 / 2 + 3e-3), rel=0.01)  # the loss is the last layer's
    assert four == pytest.approx(PAIRS * (27e-3 / 4 + 3e-3), rel=0.01)


def test_divided_gradients_are_reduced_in_parts_among_fewer(captured: Workload, network: Network) -> None:
    plan = Plan(tensor_parallel_degree=2)
    found = predict(plan, captured, network, workers=4, batch=2 * BATCH, constants=Constants())
    held = memory_of(found.plan, captured, batch=2 * BATCH)
    alone = network.collective("all_reduce", held.gradients, 2, 2, Constants())
    assert found.gradient_cost == alone


def test_the_search_considers_degrees_that_the_capture_knows(captured: Workload, network: Network) -> None:
    degrees = {p.tensor_parallel_degree for p in admissible_plans(captured, network, workers=4, batch=4 * BATCH)}
    assert degrees == {1, 2, 4}
    fixed = {"tensor_parallel_degree": 2}
    found = search(captured, network, workers=4, batch=4 * BATCH, fixed=fixed, memory_limit=0)
    assert {one.plan.tensor_parallel_degree for one in found.ranked} == {2}
    assert found.best.parts.tensor > 0


def test_tensors_are_divided_where_nothing_else_fits(captured: Workload, network: Network) -> None:
    # One sample: data parallelism has no use for a second worker, and a pipeline would wait.
    fixed = {"pipeline_parallel_degree": 1}
    network = dataclasses.replace(network, sharers=0)  # a process is larger than this model
    need = memory_of(Plan(data_parallel_degree=1), captured, batch=1).total
    found = search(captured, network, workers=2, batch=1, fixed=fixed, memory_limit=round(0.8 * need))
    assert found.best.plan.tensor_parallel_degree == 2


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        (
            {"tensor_parallel_degree": 3},
            "tensor_parallel_degree: no layer of Sequential can be divided among 3 workers; use one of 2, 4, 8",
        ),
        (
            {"tensor_parallel_degree": 2, "sequence_parallel": True},
            "sequence_parallel: nothing between the divided layers of Sequential can work on parts",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_by_search_and_prediction(fixed: dict[str, Any], said: str) -> None:
    pair = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    found = capture(pair, torch.zeros(BATCH, WIDTH), device="meta").with_times(1e-2, 2e-2)
    where = Network.of(cluster.load("star:hosts=6"))
    with pytest.raises(PlanError, match=said):
        search(found, where, workers=6, batch=6 * BATCH, fixed=fixed)
    with pytest.raises(PlanError, match=said):
        predict(Plan(**fixed), found, where, workers=6, batch=6 * BATCH)


def test_a_divided_sequence_is_predicted_where_it_is_asked_for() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), blocks())
    found = capture(model, torch.zeros(2, BATCH, WIDTH), device="meta", degrees=(2,)).with_times(1e-2, 2e-2)
    where = Network.of(cluster.load("star:hosts=2,bandwidth=10Gbit/s"))
    assert not any(p.sequence_parallel for p in admissible_plans(found, where, workers=2, batch=2))
    fixed = {"tensor_parallel_degree": 2, "sequence_parallel": True}
    best = search(found, where, workers=2, batch=2, fixed=fixed, memory_limit=0).best
    assert best.plan.sequence_parallel
    plain = predict(Plan(tensor_parallel_degree=2), found, where, workers=2, batch=2)
    assert best.memory.activations < plain.memory.activations


def test_a_model_of_which_nothing_can_be_divided_is_not() -> None:
    odd = capture(nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7)), torch.zeros(2, 7), device="meta")
    assert odd.degrees() == ()
    where = Network.of(cluster.load("star:hosts=2"))
    assert all(p.tensor_parallel_degree == 1 for p in admissible_plans(odd, where, workers=2, batch=4))
    with pytest.raises(PlanError, match=r"none of them is known to be divided by any number; use 1"):
        search(odd, where, workers=2, batch=4, fixed={"tensor_parallel_degree": 2})


def test_a_frozen_layer_is_charged_half_a_backward_pass_or_none() -> None:
    def step_s(*frozen: int) -> float:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        for number in frozen:
            model[number].requires_grad_(False)
        workload = capture(model, torch.zeros(BATCH, WIDTH), device="meta", optimizer="sgd")
        where = Network.of(cluster.load("star:hosts=2,server=dgx-h100"))
        found = predict(Plan(), workload, where, workers=1, batch=BATCH, constants=Constants(kernel_s=0.0, host_s=0.0))
        return found.parts.compute

    # Products: four ahead, and behind one for each layer's weights, and one for the input of all but the first.
    assert step_s(1, 2) == pytest.approx(step_s() * (4 + 2 + 3) / 11, rel=0.03)  # the loss is small
    assert step_s(0, 1) == pytest.approx(step_s() * (4 + 2 + 1) / 11, rel=0.03)


class _Tied(nn.Module):
    """A language model whose last matrix is that of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out = self.embedding(words)
        for block in self.blocks:
            out = out + block(out)
        found: torch.Tensor = self.head(out)
        return found


def test_stages_that_share_weights_are_not_planned_with_sharded_parameters(network: Network) -> None:
    model, words = _Tied(), torch.zeros(BATCH, 5, dtype=torch.long)
    workload = in_steps(capture(model, words), model, words)
    assert parse(str(workload)) == workload
    case = {"workers": 4, "batch": BATCH}
    plans = admissible_plans(workload, network, **case)
    piped = {plan.shard for plan in plans if plan.pipeline_parallel_degree == 2}
    assert piped == {"none", "optimizer", "gradients"}
    assert any(plan.shard == "parameters" for plan in plans)  # of the whole model
    fixed: dict[str, Any] = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 1, "shard": "parameters"}
    with pytest.raises(PlanError, match="stages share cannot be sharded .* 'head' has some of 'embedding'"):
        search(workload, network, **case, memory_limit=0, fixed=fixed)
    with pytest.raises(PlanError, match="stages share cannot be sharded"):
        predict(Plan(**fixed, micro_batches=2), workload, network, **case)
    alone = search(workload, network, **case, memory_limit=0, fixed=fixed | {"pipeline_parallel_degree": 4})
    assert alone.best.plan.pipeline_parallel_degree == 4  # each stage is on one worker, and nothing is sharded


def test_weights_that_one_stage_shares_with_itself_may_be_sharded(captured: Workload, network: Network) -> None:
    *rest, last = captured.layers
    tied = dataclasses.replace(captured, layers=(*rest, dataclasses.replace(last, tied_to=rest[-1].name)))
    fixed = {"pipeline_parallel_degree": 2, "shard": "parameters"}
    found = search(tied, network, workers=4, batch=BATCH, memory_limit=0, fixed=fixed)
    assert found.best.plan.shard == "parameters"


def test_a_layer_is_tied_to_one_before_it(captured: Workload) -> None:
    first, *rest = captured.layers
    with pytest.raises(WorkloadError, match="is tied to 'nowhere', and no layer before it"):
        dataclasses.replace(captured, layers=(dataclasses.replace(first, tied_to="nowhere"), *rest))
