"""A slab is run alone: what it exchanges, computes and keeps, and what plans with it are predicted to take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hocket
from hocket import cluster
from hocket.parallel.partition import DRY_RUNS
from hocket.planner import Constants, Network, Plan, PlanError, memory_of, predict, search
from hocket.sharding import Shard, SlidingWindow, halo_nbytes
from hocket.testing import run_ranks
from hocket.workload import Exchange, Workload, capture, parse

HEIGHT, WIDTH, CHANNELS, BATCH = 16, 12, 4, 2


def network(dims: int = 2) -> nn.Module:
    kinds = (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d) if dims == 2 else (nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d)
    convolution, norm, pool = kinds
    last = convolution(CHANNELS, 2, 5, padding=2)
    return nn.Sequential(convolution(3, CHANNELS, 3, padding=1), norm(CHANNELS), nn.ReLU(), pool(2), last)


def captured(dims: int = 2, *, device: str | None = None, batch: int = BATCH) -> Workload:
    sample = torch.rand(batch, 3, HEIGHT, *(WIDTH,) * (dims - 1))
    return capture(network(dims), sample, device=device, degrees=(2, 4), dry_runs=DRY_RUNS)


@pytest.mark.parametrize("dims", [2, 3])
def test_exchanges_have_the_bytes_of_the_halos(dims: int) -> None:
    found = captured(dims, device="meta")
    first, norm, _, _, last = (layer.share(2, axis="spatial").exchanges for layer in found.layers)
    rows = 4 * BATCH * 3 * WIDTH ** (dims - 1)
    # Bytes that both ranks receive are those of the vector of an all_to_all of two.
    nbytes = halo_nbytes(Shard.even(0, HEIGHT, 2), SlidingWindow(3, low=1, high=1), rows)
    assert first == (Exchange("forward", "all_to_all", nbytes),)
    assert [(one.phase, one.kind) for one in norm] == [("forward", "all_reduce"), ("backward", "all_reduce")]
    rows = 4 * BATCH * CHANNELS * (WIDTH // 2) ** (dims - 1)
    nbytes = halo_nbytes(Shard.even(0, HEIGHT // 2, 2), SlidingWindow(5, low=2, high=2), rows)
    halos = [one for one in last if one.kind == "all_to_all"]
    assert halos == [Exchange("forward", "all_to_all", nbytes), Exchange("backward", "all_to_all", nbytes)]


def test_work_and_memory_are_divided_and_parameters_are_not() -> None:
    found = captured(device="meta")
    for degree in (2, 4):
        shares = [layer.share(degree, axis="spatial") for layer in found.layers]
        work = [one for share in shares for one in share.operations]
        assert sum(one.flops for one in work if one.phase != "backward") == pytest.approx(found.flops / degree)
        assert [share.parameter_bytes for share in shares] == [layer.parameter_bytes for layer in found.layers]
        saved = sum(one.saved_bytes for one in work)
        assert found.saved_bytes / degree <= saved < 0.9 * found.saved_bytes
    assert found.degrees("spatial") == (2, 4)
    assert parse(str(found)) == found
    whole, half = (
        memory_of(Plan(spatial_parallel_degree=degree).resolve(2), found, batch=BATCH).activations for degree in (1, 2)
    )
    # Two samples on two ranks: one each, or half of both and what is borrowed.
    assert whole <= half < 1.8 * whole


def test_the_model_is_afterwards_as_it_was() -> None:
    model, sample = network(), torch.rand(BATCH, 3, HEIGHT, WIDTH)
    before, kind = {key: value.clone() for key, value in model.state_dict().items()}, type(model)
    expected = model.eval()(sample)
    capture(model, sample, degrees=(2,), dry_runs=DRY_RUNS)
    assert type(model) is kind
    assert not hasattr(model, "spatial")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(model.eval()(sample), expected)
    assert all(p.grad is None for p in model.parameters())


def test_a_model_without_spatial_dims_says_nothing_and_is_refused() -> None:
    found = capture(nn.Linear(4, 4), torch.rand(2, 4), device="meta", degrees=(2,), dry_runs=DRY_RUNS)
    assert found.degrees("spatial") == ()
    where = cluster.load("star:hosts=2")
    with pytest.raises(PlanError, match="does not say how 2 workers divide its samples"):
        predict(Plan(spatial_parallel_degree=2), found, where, workers=2, batch=2)


def wires(gbits: float) -> Network:
    return Network.of(cluster.load(f"star:hosts=2,bandwidth={gbits}Gbit/s,latency=1us"))


@pytest.mark.long
def test_one_sample_is_shared_where_the_network_allows_it() -> None:
    model = nn.Sequential(*(nn.Conv3d(8, 8, 3, padding=1) for _ in range(3)))
    found = capture(model, torch.rand(1, 8, 32, 32, 32), degrees=(2,), dry_runs=DRY_RUNS, optimizer="sgd")
    assert sum(layer.share(2, axis="spatial").forward_s for layer in found.layers) > 0
    fixed = {"tensor_parallel_degree": 1, "pipeline_parallel_degree": 1}
    best = search(found, wires(100), workers=2, batch=1, constants=Constants(), fixed=fixed, memory_limit=0).best
    assert best.plan.spatial_parallel_degree == 2
    assert best.plan.data_parallel_degree == 1
    slow, fast = (
        predict(Plan(spatial_parallel_degree=2), found, wires(rate), workers=2, batch=1).parts for rate in (0.1, 100)
    )
    assert slow.tensor > 10 * fast.tensor > 0
    assert slow.gradients > fast.gradients > 0  # of all parameters, over the ranks that share samples


def chosen() -> tuple[int, str]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv3d(3, 3, 3, padding=1) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.rand(1, 3, 16, 16, 16)  # channels that two ranks cannot divide
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, "auto", sample=x)
    trainer.step((x, x))
    return trainer.plan.spatial_parallel_degree, trainer.report()["plan"]


@pytest.mark.long
def test_an_automatic_plan_shares_one_sample_among_two_ranks() -> None:
    for degree, said in run_ranks(chosen, 2, timeout_s=110):
        assert degree == 2, said
