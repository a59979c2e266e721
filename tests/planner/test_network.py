"""What collectives take on the wires of a cluster, and which algorithms are considered."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from fractions import Fraction

import pytest

from hocket import cluster
from hocket.algorithms import REGISTRY, ClosedForm, ring
from hocket.algorithms._algorithm import algorithm
from hocket.planner import Constants, Network, Plan, predict, step_graph
from hocket.planner.network import _network as network
from hocket.schedule import Collective, Schedule
from hocket.workload import Layer, Operation, Workload


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    @algorithm(
        title="Toy",
        source="here",
        kinds=("all_reduce",),
        form=lambda collective: ClosedForm(1, Fraction(1, 8), Fraction(1, 8)),
    )
    def toy(collective: Collective) -> Schedule:
        made = ring(collective)
        return Schedule("toy", collective, made.chunks, made.steps)

    monkeypatch.setitem(REGISTRY, toy.name, toy)
    network._forms.cache_clear()
    yield toy.name
    network._forms.cache_clear()


def test_an_algorithm_that_is_registered_is_planned_with(toy: str) -> None:
    where = cluster.load("star:hosts=8,bandwidth=1Gbit/s,latency=15us")
    assert Network.of(where).collective("all_reduce", 1e8, 8, 1, Constants()).algorithm == toy
    assert Network.of(where).collective("all_gather", 1e8, 8, 1, Constants()).algorithm != toy
    work = (Operation("forward", 1e9, saved_bytes=1e6),)
    layers = (Layer("l", "x", 10**6, 4 * 10**6, 4 * 10**6, 0, 1e5, work, 2e-2, 4e-2),)
    workload = Workload("net", 1, layers)
    assert predict(Plan(), workload, where, workers=8, batch=8).gradient_cost.algorithm == toy
    graph = step_graph(Plan(), workload, where, workers=8, batch=8)
    assert any(one.name == "gradients (toy)" for one in graph.collects)


def test_a_cluster_is_looked_at_once_and_forgotten_with_it() -> None:
    where = cluster.load("star:hosts=4")
    assert network.network_of(where) is network.network_of(where)
    before = len(network._networks)
    del where
    gc.collect()
    assert len(network._networks) < before
