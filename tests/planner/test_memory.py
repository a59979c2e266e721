"""Memory of a plan, against the published accounting."""

from __future__ import annotations

import dataclasses

import pytest

from hocket.cluster import load
from hocket.planner import Network, Plan, PlanError, balanced_cuts, in_flight, memory_of
from hocket.workload import Layer, Operation, Workload, named_transformer


def zero(billions: float) -> Workload:
    """A model of ZeRO's accounting: 2 bytes a parameter, 2 a gradient, 12 of optimizer state."""
    count = round(billions * 1e9)
    return Workload("zero", 1, (Layer("all", "x", count, 2 * count, 2 * count, 12 * count),))


# Rajbhandari et al. 2020, figure 1 and table 1, in GB: billions, workers, then none, optimizer, gradients, parameters.
@pytest.mark.parametrize(
    ("billions", "workers", "expected"),
    [
        (7.5, 4, (120, 52.5, 41.25, 30.0)),
        (7.5, 16, (120, 35.625, 21.5625, 7.5)),
        (7.5, 64, (120, 31.40625, 16.640625, 1.875)),
        (7.5, 1024, (120, 30.087890625, 15.1025390625, 0.1171875)),
        (128, 1024, (2048, 513.5, 257.75, 2.0)),
        (1000, 1024, (16000, 4011.71875, 2013.671875, 15.625)),
    ],
)
def test_zero_s_model_state_is_exact(billions: float, workers: int, expected: tuple[float, ...]) -> None:
    stages = ("none", "optimizer", "gradients", "parameters")
    for stage, gigabytes in zip(stages, expected, strict=True):
        plan = Plan(shard=stage).resolve(workers)
        assert memory_of(plan, zero(billions), batch=workers).state == pytest.approx(gigabytes * 1e9, rel=1e-9)


def test_tensor_parallelism_divides_what_can_be_divided() -> None:
    layers = (
        Layer("a", "x", 10, 40, 40, 80, tensor_limit=4),
        Layer("b", "x", 10, 40, 40, 80),
    )
    memory = memory_of(Plan(tensor_parallel_degree=4).resolve(4), Workload("w", 1, layers), batch=1)
    assert (memory.parameters, memory.gradients, memory.optimizer) == (50, 50, 100)


def test_stages_hold_their_own_layers_and_the_micro_batches_under_way() -> None:
    layers = tuple(Layer(f"l{i}", "x", 1, 4, 4, 8, 10.0, (Operation("o", 1.0, saved_bytes=100.0),)) for i in range(8))
    workload = Workload("w", 1, layers)
    for schedule, first, last in (("gpipe", 8, 8), ("1f1b", 4, 1), ("zero_bubble", 4, 1)):
        plan = Plan(pipeline_parallel_degree=4, micro_batches=8, pipeline_schedule=schedule).resolve(4)
        each = [memory_of(plan, workload, batch=8, rank=rank) for rank in range(4)]
        assert [one.parameters for one in each] == [8, 8, 8, 8]
        assert (each[0].activations, each[3].activations) == (200 * first, 200 * last)
        assert memory_of(plan, workload, batch=8) == each[0]


@pytest.mark.parametrize(("pipeline", "stages"), [(4, 2), (8, 3), (35, 3)])
def test_interleaving_holds_what_korthikanti_et_al_say(pipeline: int, stages: int) -> None:
    plan = Plan(
        pipeline_parallel_degree=pipeline,
        stages_per_rank=stages,
        pipeline_schedule="interleaved",
        micro_batches=8 * pipeline,
    )
    # Their section 4.2.3: L (1 + (p - 1) / (p m)) layers; in units of one rank's layers, times p.
    assert in_flight(plan, 0) == pytest.approx(pipeline * (1 + (pipeline - 1) / (pipeline * stages)))


def test_recomputation_keeps_less_and_needs_room_for_one_layer() -> None:
    workload = named_transformer("gpt-7b")
    plain, full = (memory_of(Plan(recompute=again).resolve(1), workload, batch=1) for again in (False, True))
    assert full.activations < plain.activations / 10
    assert full.working > plain.working
    assert full.state == plain.state


def test_more_stages_than_layers_are_refused() -> None:
    workload = Workload("w", 1, (Layer("a", "x"),))
    with pytest.raises(PlanError, match="2 stages need as many layers, and w has 1"):
        memory_of(Plan(pipeline_parallel_degree=2).resolve(2), workload, batch=1)


@pytest.mark.parametrize(
    ("costs", "parts", "cuts"),
    [
        ([0.01, *[1.0] * 96, 0.35], 8, [13, 25, 37, 49, 61, 73, 85]),
        ([5, 1, 1, 1, 1, 1], 3, [1, 4]),
        ([1, 1], 2, [1]),
        ([0, 0, 0, 1], 3, [1, 2]),
    ],
)
def test_stages_are_balanced(costs: list[float], parts: int, cuts: list[int]) -> None:
    found = balanced_cuts(costs, parts)
    edges = [0, *found, len(costs)]
    best = [0, *cuts, len(costs)]
    heaviest = [max(sum(costs[a:b]) for a, b in zip(e, e[1:], strict=False)) for e in (edges, best)]
    assert heaviest[0] == pytest.approx(heaviest[1])
    assert all(a < b for a, b in zip(edges, edges[1:], strict=False))


def test_a_process_in_a_host_s_memory_takes_more_than_its_tensors() -> None:
    mib = 2**20
    workload = Workload("w", 4, tuple(Layer(f"l{i}", "x", mib, 4 * mib, 4 * mib, 8 * mib) for i in range(16)))
    alone = memory_of(Plan().resolve(1), workload, batch=4, sharers=1)
    assert alone.process == 260 * mib + 2 * 4 * mib  # the interpreter, and two values of the largest layer
    assert alone.resident == alone.total == alone.state + alone.process
    for shard, mapped in (("none", 2 * 64 * mib * 3 / 4), ("optimizer", 2 * 64 * mib * 3 / 4)):
        four = memory_of(Plan(shard=shard).resolve(4), workload, batch=4, sharers=4)
        assert four.mapped == mapped  # of each reduction in place it reads what the three others have
        assert four.resident == four.total + mapped
    on_devices = memory_of(Plan().resolve(4), workload, batch=4)
    assert on_devices.process == on_devices.mapped == 0


def test_what_computes_in_a_host_s_memory_is_told_from_devices_with_memory_of_their_own() -> None:
    for name, sharers in (("laptop", 4), ("star:hosts=8", 1), ("sharp-1500", 40), ("selene-like", 0), ("lassen", 0)):
        assert Network.of(load(name)).sharers == sharers, name


def _of_two(**more: float) -> Workload:
    """Layers with known peaks; behind the second one is a loss that makes 60 bytes for a moment."""
    work = (Operation("o", 1.0, saved_bytes=100.0),)
    first = Layer("a", "x", 10, 40, 40, 80, 8.0, work, peak_bytes=130.0, peak_fixed_bytes=40.0)
    last = Layer("b", "x", 10, 40, 40, 80, 0.0, work, peak_bytes=160.0, **more)
    return Workload("w", 2, (first, last))


def test_activations_leave_while_gradients_come() -> None:
    alone = memory_of(Plan().resolve(1), _of_two(), batch=2)
    assert (alone.activations, alone.working, alone.gradients) == (200, 60, 80)
    assert alone.absent == 80  # in the loss there are no gradients yet
    assert alone.total == 240 + 200 + 60
    # With a gradient of its own at that moment, and one more: tied to a parameter of the first layer.
    assert memory_of(Plan().resolve(1), _of_two(peak_fixed_bytes=70.0), batch=2).total == 240 + 200 + 60 + 70
    # A quarter of the batch: the first layer's moment has both gradients, the update a value for each besides.
    less = memory_of(Plan().resolve(1), dataclasses.replace(_of_two(), batch=8), batch=2)
    assert less.total == 240 + 80 + 80
    assert (less.absent, less.working) == (less.activations, 80)
    plain = dataclasses.replace(_of_two(), layers=tuple(_momentum(layer) for layer in _of_two().layers), batch=8)
    assert memory_of(Plan().resolve(1), plain, batch=2).total == 160 + 32.5 + 80


def _momentum(layer: Layer) -> Layer:
    return dataclasses.replace(layer, optimizer_bytes=40)


def test_gradients_in_buckets_or_of_earlier_micro_batches_are_there_all_the_time() -> None:
    copies = memory_of(Plan(data_parallel_degree=2, shard="optimizer").resolve(2), _of_two(), batch=4)
    assert copies.absent == 0
    assert copies.total - copies.buffers == copies.state + 200 + 60
    # Plain copies have none before gradients come, on a device (6,834 MiB of a GPT on an H100, where 6,770 are said).
    alone = memory_of(Plan().resolve(1), _of_two(), batch=2)
    assert memory_of(Plan(data_parallel_degree=2).resolve(2), _of_two(), batch=4) == alone
    parts = memory_of(Plan(accumulate=2).resolve(1), _of_two(), batch=4)
    assert parts.total == 240 + 200 + 60 + 80
    many = dataclasses.replace(_of_two(), layers=_of_two().layers[:1])
    assert memory_of(Plan(accumulate=2).resolve(1), many, batch=4).total == 120 + 130 + 40 + 40  # one as it arrives
    sharded = memory_of(Plan(data_parallel_degree=2, shard="parameters").resolve(2), _of_two(), batch=4)
    assert (sharded.gradients, sharded.absent) == (40, 40)  # parts of them come as their layers are done


def test_only_the_last_stage_has_the_loss() -> None:
    plan = Plan(pipeline_parallel_degree=2, micro_batches=2).resolve(2)
    first, last = (memory_of(plan, _of_two(), batch=4, cuts=[1], rank=rank) for rank in range(2))
    assert (first.activations, last.activations) == (200, 100)  # of two micro-batches, and of one
    assert (first.working, last.working) == (30, 60)
    assert (first.absent, last.absent) == (0, 0)
    # With more micro-batches than are under way gradients are added up when most activations are there.
    more = Plan(pipeline_parallel_degree=2, micro_batches=4).resolve(2)
    assert memory_of(more, _of_two(), batch=8, cuts=[1], rank=0).working == 30 + 40


def test_a_process_gives_nothing_back_so_its_kinds_add_up() -> None:
    found = memory_of(Plan().resolve(1), _of_two(), batch=2, sharers=1)
    assert found.absent == 0
    assert (found.activations, found.working) == (200, 60)
