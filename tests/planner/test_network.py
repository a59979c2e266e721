"""What collectives take on the wires of a cluster, and which algorithms are considered."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest

from hocket import cluster
from hocket.algorithms import REGISTRY, ClosedForm, get, planned, ring
from hocket.algorithms._algorithm import algorithm
from hocket.planner import Constants, Network, Plan, assumptions, predict, step_graph
from hocket.planner.network import _cost_lines
from hocket.planner.network import _network as network
from hocket.schedule import Collective, Schedule
from hocket.simulate import StepGraph, simulate_step
from hocket.workload import Layer, Operation, Workload, transformer

# The links' own rates.
PLAIN = Constants(inside_share=1.0, network_share=1.0, collective_s=0.0)


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
    _cost_lines.forms_of.cache_clear()
    yield toy.name
    _cost_lines.forms_of.cache_clear()


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
    assert network.network_of(where) is network.network_of(where) is Network.of(where)
    assert Network.of(cluster.load("closet")) is Network.of(cluster.load("closet"))
    before = len(network._networks)
    del where
    gc.collect()
    assert len(network._networks) < before


@pytest.mark.parametrize(
    ("spec", "workers", "size", "stride"),
    [
        ("star:hosts=2,bandwidth=4Gbit/s,latency=1us,server=commodity,server.devices=3,server.nics=1", 4, 4, 1),
        ("rails:hosts=3,spines=1,bandwidth=7Gbit/s,latency=2us,server=dgx-b200", 18, 18, 1),
        ("star:hosts=2,bandwidth=2Gbit/s,latency=2us,server.ranks=6", 8, 4, 2),
    ],
)
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_groups_that_lie_on_hosts_in_different_ways_take_what_the_simulator_says(
    spec: str, workers: int, size: int, stride: int, kind: str
) -> None:
    # Who is done with a step first goes on, and shares the port with who is behind: a circulant loses a third by it.
    where = cluster.load(spec)
    cost = Network.of(where).first(workers).collective(kind, 1e8, size, stride, PLAIN)
    schedule, graph = get(cost.algorithm)(Collective(kind, size), **dict(cost.given)), StepGraph(workers)
    for ranks in np.arange(workers).reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size):
        graph.collective(schedule, 1e8, ranks=ranks)
    assert cost.seconds == pytest.approx(simulate_step(graph, where).seconds, rel=0.05)


@pytest.mark.parametrize("nbytes", [1e6, 4e7, 8e8])
def test_the_fastest_algorithm_is_found_also_where_latency_is_what_steps_overlap(nbytes: float) -> None:
    # Step by step a circulant is faster than a ring, though a ring's steps pass the long way one after the other.
    where = cluster.load("star:hosts=2,bandwidth=2Gbit/s,latency=50ms,server.ranks=3")
    taken = {}
    for line in Network.of(where).first(5)._lines("all_reduce", 5, 1, PLAIN):
        graph = StepGraph(5)
        graph.collective(line.algorithm(Collective("all_reduce", 5), **dict(line.given)), nbytes, ranks=np.arange(5))
        taken[line.algorithm.name] = simulate_step(graph, where).seconds
    cost = Network.of(where).first(5).collective("all_reduce", nbytes, 5, 1, PLAIN)
    assert taken[cost.algorithm] < 1.1 * min(taken.values())


def _hosts(wide: dict[tuple[int, int], str], ports: dict[int, str], uplinks: dict[int, str]) -> cluster.Cluster:
    """Return four hosts of two devices at two leaves and a spine; 50 GB/s to devices and 100 Gbit/s unless said."""
    text = '[[nodes]]\nname = "spine"\nkind = "switch"\n'
    links = []
    for leaf in range(2):
        text += f'[[nodes]]\nname = "leaf{leaf}"\nkind = "switch"\n'
        links.append((f"leaf{leaf}", "spine", uplinks.get(leaf, "200 Gbit/s")))
    for host in range(4):
        text += f'[[nodes]]\nname = "bus{host}"\nkind = "nvswitch"\nhost = "h{host}"\n'
        links.append((f"bus{host}", f"leaf{host // 2}", ports.get(host, "100 Gbit/s")))
        for device in range(2):
            name = f"h{host}d{device}"
            text += f'[[nodes]]\nname = "{name}"\nkind = "device"\nhost = "h{host}"\n'
            links.append((name, f"bus{host}", wide.get((host, device), "50 GB/s")))
    for a, b, rate in links:
        text += f'[[links]]\nends = ["{a}", "{b}"]\nbandwidth = "{rate}"\nlatency = "1 us"\n'
    return cluster.from_toml(text)


UNLIKE = {
    "a slow device": _hosts({(2, 1): "1 GB/s"}, {}, {}),
    "a slow host": _hosts({(3, 0): "2 GB/s", (3, 1): "2 GB/s"}, {}, {}),
    "a slow port": _hosts({}, {2: "10 Gbit/s"}, {}),
    "two slow ports": _hosts({}, {2: "25 Gbit/s", 3: "25 Gbit/s"}, {}),
    "a slow uplink": _hosts({}, {}, {1: "20 Gbit/s"}),
}


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize(("size", "stride"), [(8, 1), (4, 2)])
@pytest.mark.parametrize("what", UNLIKE)
def test_collectives_of_ranks_with_unlike_links_take_what_the_simulator_says(
    what: str, kind: str, size: int, stride: int
) -> None:
    # Nobody's step ends when the others' do; algorithms that were taken for alike lost a quarter by it.
    where = UNLIKE[what]
    cost = Network.of(where).collective(kind, 1e8, size, stride, PLAIN)
    schedule, graph = get(cost.algorithm)(Collective(kind, size), **dict(cost.given)), StepGraph(8)
    for ranks in np.arange(8).reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size):
        graph.collective(schedule, 1e8, ranks=ranks)
    assert cost.seconds == pytest.approx(simulate_step(graph, where).seconds, rel=0.01)


@pytest.mark.parametrize("nbytes", [1e4, 1e8])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
@pytest.mark.parametrize(
    ("spec", "workers", "size", "stride"),
    [
        ("star:hosts=1,server=dgx1", 8, 8, 1),
        ("star:hosts=1,server=dgx1", 6, 3, 2),  # the fastest avoids the slow links of the neighbours in the ring
        ("star:hosts=1,server=dgx1", 5, 5, 1),
        ("star:hosts=1,server=ac922,server.devices=6", 6, 6, 1),
        ("star:hosts=2,server=host,server.ranks=3,bandwidth=10Gbit/s", 6, 3, 2),  # two members here and one there
        ("star:hosts=2,server=host,server.ranks=4,bandwidth=10Gbit/s", 5, 5, 1),
    ],
)
def test_ranks_whose_links_in_a_host_are_unlike_take_the_fastest_that_the_simulator_knows(
    spec: str, workers: int, size: int, stride: int, kind: str, nbytes: float
) -> None:
    where = cluster.load(spec)
    groups = np.arange(workers).reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size)
    collective, took = Collective(kind, size), []
    for one, given in planned(collective):
        graph, schedule = StepGraph(workers), one(collective, **given)
        for ranks in groups:
            graph.collective(schedule, nbytes, ranks=ranks)
        took.append(simulate_step(graph, where).seconds)
    cost = Network.of(where).first(workers).collective(kind, nbytes, size, stride, PLAIN)
    assert cost.seconds == pytest.approx(min(took), rel=0.1)


def test_of_hosts_whose_links_differ_inside_the_slowest_counts() -> None:
    assert Network.of(_hosts({}, {}, {})).unlike == ""
    found = Network.of(_hosts({(3, 0): "2 GB/s", (3, 1): "2 GB/s"}, {}, {}))
    assert (found.unlike, found.inside_Bps, found.host_Bps, found.rank_Bps) == ("links", 2e9, 4e9, 2e9)


def test_groups_that_lie_unevenly_on_a_measured_cluster_take_what_the_simulator_says_too() -> None:
    # three of six on hosts of four: only some of the links are reached, and no ring enters a host by all ports
    where = cluster.load("lassen")
    work = (Operation("forward", 1e9, saved_bytes=1e6),)
    layers = tuple(Layer(f"l{i}", "x", 10**7, 4 * 10**7, 4 * 10**7, 0, 1e4, work, 1e-3, 2e-3) for i in range(2))
    asked = {"workers": 6, "batch": 6}
    plan, net = Plan(pipeline_parallel_degree=2, micro_batches=2), Workload("net", 1, layers)
    found = predict(plan, net, where, **asked)
    simulated = simulate_step(step_graph(plan, net, where, **asked), where).seconds
    assert found.parts.gradients > found.parts.compute
    assert found.step_s == pytest.approx(simulated, rel=0.1)


def test_a_group_of_all_ranks_has_the_ports_of_its_hosts_to_itself() -> None:
    where = Network.of(cluster.load("star:hosts=4,bandwidth=2Gbit/s,latency=2us,server.ranks=6"))
    unrouted = dataclasses.replace(where, routed=None)  # as of clusters that say what is reached
    eight, twelve = (
        unrouted.first(workers).collective("all_reduce", 1e8, workers, 1, PLAIN).seconds for workers in (8, 12)
    )
    assert eight < 2 * twelve  # 6 and 2 ranks pass 7/4 of the vector along the hosts; two times 6 pass all of it
    assert eight == pytest.approx(where.first(8).collective("all_reduce", 1e8, 8, 1, PLAIN).seconds, rel=0.2)


@pytest.mark.parametrize(
    ("spec", "workers"),
    [
        ("single:server=mi300x", 8),
        pytest.param("rails:hosts=2,server=mi300x,bandwidth=400Gbit/s", 16, marks=pytest.mark.long),
        pytest.param("rails:hosts=2,server=dgx-h100,bandwidth=400Gbit/s", 16, marks=pytest.mark.long),
    ],
)
def test_collectives_of_a_measured_cluster_use_all_links_in_the_simulator_too(spec: str, workers: int) -> None:
    where = cluster.load(f"{spec},reached.network_share=0.8,reached.inside_share=0.7")
    work = (Operation("forward", 1e9, saved_bytes=1e6),)
    layers = (Layer("l", "x", 5 * 10**8, 2 * 10**9, 2 * 10**9, 0, 1e5, work, 1e-3, 2e-3),)
    workload, plan = Workload("net", 1, layers), Plan(shard="gradients", bucket_bytes=2 * 10**9)
    found = predict(plan, workload, where, workers=workers, batch=workers)
    simulated = simulate_step(step_graph(plan, workload, where, workers=workers, batch=workers), where).seconds
    assert found.parts.gather > found.parts.compute
    assert found.step_s == pytest.approx(simulated, rel=0.05)


def _unlike(*figures: str, rates: tuple[str, ...] = ("10 GB/s",) * 3) -> Network:
    """Return hosts that have one device each, of such figures, at one switch by links of such rates."""
    text = '[[nodes]]\nname = "s"\nkind = "switch"\n'
    for number, (figure, rate) in enumerate(zip(figures, rates, strict=True)):
        text += f'[[nodes]]\nname = "h{number}"\n{figure}\n'
        text += f'[[links]]\nends = ["h{number}", "s"]\nbandwidth = "{rate}"\n'
    return Network.of(cluster.from_toml(text))


V100 = 'flops = "15.7 TFLOP/s"\nfloat16_flops = "125 TFLOP/s"\nmemory = "16 GiB"\nmemory_bandwidth = "900 GB/s"'
A100 = (
    'flops = "312 TFLOP/s"\ntf32_flops = "156 TFLOP/s"\nfloat32_flops = "19.5 TFLOP/s"\nmemory = "80 GiB"\n'
    'memory_bandwidth = "2039 GB/s"'
)


def test_of_devices_that_differ_the_slowest_and_smallest_counts_in_every_respect() -> None:
    """The first host had stood for all: a V100 behind it computed as an A100, and had its memory."""
    mixed = _unlike(A100, A100, V100)
    assert mixed.unlike == "devices"
    assert (mixed.memory_nbytes, mixed.memory_Bps) == (16 * 2**30, 900e9)
    peaks = {name: mixed.peak(name)[0] for name in ("bfloat16", "float16", "tf32", "float32")}
    assert peaks == {"bfloat16": 15.7e12, "float16": 125e12, "tf32": 15.7e12, "float32": 15.7e12}
    assert _unlike(A100, A100, A100).unlike == ""
    assert _unlike(A100, A100, A100.replace('memory = "80 GiB"', "")).memory_nbytes == 0  # nobody knows it


def test_hosts_that_take_no_part_do_not_count() -> None:
    """Two workers on fast hosts had the rates of a slow third one, which they do not use."""
    slow = ("10 GB/s", "10 GB/s", "1 GB/s")
    mixed, even = _unlike(A100, A100, V100, rates=slow), _unlike(A100, A100, A100)
    two, same = mixed.first(2), even.first(2)
    assert (mixed.unlike, two.unlike, mixed.first(3).unlike) == ("devices ports", "", "devices ports")
    for name in ("flops", "memory_Bps", "memory_nbytes", "tf32_flops", "host_Bps", "rank_Bps"):
        assert getattr(two, name) == getattr(same, name)
    model, plan = transformer(256, 2, 4, sequence=64, vocabulary=128), Plan(shard="optimizer")
    asked = {"workers": 2, "batch": 4}
    found = [predict(plan, model, where, **asked) for where in (mixed, even)]
    assert found[0].parts == found[1].parts
    assert found[0].memory_limit == found[1].memory_limit
    rows = [assumptions(one, where, precision="bfloat16") for one, where in zip(found, (mixed, even), strict=True)]
    assert rows[0] == rows[1]
    by_hand = dataclasses.replace(mixed, flops=1e12).first(2)  # stays, whatever the devices are
    assert (by_hand.flops, by_hand.memory_nbytes) == (1e12, same.memory_nbytes)


def test_links_in_a_host_that_takes_no_part_do_not_count() -> None:
    found = Network.of(_hosts({(3, 0): "2 GB/s", (3, 1): "2 GB/s"}, {}, {}))
    assert found.unlike == "links"
    even = Network.of(_hosts({}, {}, {}))
    for workers in (2, found.local, 2 * found.local):
        one, other = found.first(workers), even.first(workers)
        assert (one.unlike, one.inside_Bps, one.rank_Bps) == ("", other.inside_Bps, other.rank_Bps)


def test_of_hosts_whose_ports_differ_the_narrowest_stands_for_all() -> None:
    found = _unlike(A100, A100, A100, rates=("10 GB/s", "10 GB/s", "1 GB/s"))
    assert (found.unlike, found.host_Bps, found.rank_Bps) == ("ports", 1e9, 1e9)
    same = _unlike(A100, A100, A100, rates=("1 GB/s", "10 GB/s", "10 GB/s"))
    assert (same.host_Bps, same.rank_Bps) == (1e9, 1e9)


def test_what_differs_among_hosts_is_one_of_the_assumptions() -> None:
    where = _unlike(A100, V100, A100, rates=("10 GB/s", "1 GB/s", "10 GB/s"))
    found = predict(Plan(), transformer(256, 2, 4, sequence=64, vocabulary=128), where, workers=3, batch=3)
    rows = {name: value for name, value, _ in assumptions(found, where, precision="bfloat16")}
    assert all("all are taken for the least" in rows[what] for what in ("devices", "ports"))
