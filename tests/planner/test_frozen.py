"""Models of which only a part is trained: fine-tuning a head, adapters."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from hocket import cluster
from hocket.planner import Constants, Network, Plan, Profile, memory_of, predict
from hocket.workload import Workload, capture, parse

WIDTH, BLOCKS, WORKERS = 256, 6, 4
HEAD_NBYTES = 4 * (WIDTH * 8 + 8)


def made(frozen: bool) -> Workload:
    """A backbone with a small head behind it."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)), nn.Linear(WIDTH, 8))
    model[:BLOCKS].requires_grad_(not frozen)
    return capture(model, torch.zeros(4, WIDTH), device="meta", degrees=())


@pytest.fixture(scope="module")
def frozen() -> Workload:
    return made(True)


@pytest.fixture(scope="module")
def network() -> Network:
    return Network.of(cluster.load("star:hosts=4,bandwidth=1Gbit/s,latency=10us,server.flops=1TFLOP/s"))


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_behind_an_update_only_what_is_trained_is_gathered(frozen: Workload, network: Network, shard: str) -> None:
    plan = Plan(data_parallel_degree=WORKERS, shard=shard)
    found = predict(plan, frozen, network, workers=WORKERS, batch=16)
    head = network.collective("all_gather", HEAD_NBYTES, WORKERS, 1, found.constants).seconds
    assert found.parts.gather == pytest.approx(head)
    whole = predict(plan, made(False), network, workers=WORKERS, batch=16)
    assert whole.parts.gather > 20 * head


def test_sharded_parameters_are_gathered_back_only_from_the_first_trained_layer_on(
    frozen: Workload, network: Network
) -> None:
    plan = Plan(data_parallel_degree=WORKERS, shard="parameters")
    constants = Constants(overlap=False)
    each = [layer.parameter_bytes for layer in frozen.layers]
    found = predict(plan, frozen, network, workers=WORKERS, batch=16, constants=constants)

    def gathered_s(nbytes: float) -> float:
        sharded = dataclasses.replace(constants, gather_share=constants.gather_share * constants.fetch_share)
        return network.collective("all_gather", nbytes, WORKERS, 1, sharded).seconds

    assert found.parts.gather == pytest.approx(sum(map(gathered_s, each)) + gathered_s(each[-1]))


def test_a_stage_of_frozen_layers_updates_nothing(frozen: Workload, network: Network) -> None:
    measured = dataclasses.replace(
        frozen,
        optimizer_s=1e-2,
        layers=tuple(dataclasses.replace(one, forward_s=1e-3, backward_s=1e-3) for one in frozen.layers),
    )
    profile = Profile(measured, network, Constants())
    plan = Plan(pipeline_parallel_degree=2).resolve(2)
    assert profile.update_s(plan, np.arange(BLOCKS)) == 0
    assert profile.update_s(plan, np.array([BLOCKS])) == pytest.approx(1e-2)


def test_an_update_makes_values_for_trained_parameters_alone(frozen: Workload) -> None:
    plan = Plan(data_parallel_degree=2).resolve(2)
    one, other = (memory_of(plan, each, batch=8, sharers=2) for each in (frozen, made(False)))
    assert other.process - one.process == 2 * 4 * (WIDTH * WIDTH + WIDTH) - 2 * HEAD_NBYTES
    sharded = memory_of(dataclasses.replace(plan, shard="optimizer"), frozen, batch=8, sharers=2)
    assert sharded.mapped == pytest.approx(2 * HEAD_NBYTES / 2)


def test_frozen_tensors_are_told_apart(frozen: Workload) -> None:
    assert [layer.frozen_tensors for layer in frozen.layers] == [2] * BLOCKS + [0]
    assert parse(str(frozen)) == frozen
    assert "frozen_tensors" not in str(made(False))
