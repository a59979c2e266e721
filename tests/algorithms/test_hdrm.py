from __future__ import annotations

import numpy as np
import pytest

from hocket.algorithms import halving_doubling, hdrm, hdrm_places
from hocket.cluster import load
from hocket.schedule import Collective, Schedule, ScheduleError, link_loads, verify

# All BiGraphs of powers of two with up to 2,048 ports and as many upper switches as ports at each, or more.
SHAPES = [(1 << h, 1 << m) for h in range(11) for m in range(h + 1) if 2 << (h + m) <= 2048]


def busiest_link(schedule: Schedule, upper: int, ports: int) -> int:
    """The most flows of one step on one directed link; -1 if a flow stays in its part of the graph."""
    most = 0
    for step in schedule.each_step():
        source, destination = step.source // ports, step.destination // ports
        if ((source < upper) == (destination < upper)).any():
            return -1
        link = source.astype(np.int64) * 2 * upper + destination
        most = max(most, int(np.unique(link, return_counts=True)[1].max()))
    return most


@pytest.mark.parametrize("order", ["halving", "doubling"])
def test_every_flow_of_every_step_has_a_link_of_its_own(order: str) -> None:
    for upper, ports in SHAPES:
        schedule = hdrm(Collective("all_reduce", 2 * upper * ports), upper=upper, ports=ports, order=order)
        assert busiest_link(schedule, upper, ports) == 1, (upper, ports)


def test_the_physical_order_is_that_of_the_clusters_bigraph() -> None:
    for upper, ports in ((1, 1), (4, 2), (8, 8), (16, 2)):
        cluster = load(f"bigraph:upper={upper},ports={ports}")
        schedule = hdrm(Collective("all_reduce", 2 * upper * ports), upper=upper, ports=ports)
        loads = link_loads(schedule, cluster)
        assert {(load.most_flows, load.hops) for load in loads} == {(1, 3)}  # NIC, switch to switch, NIC
        assert verify(schedule) == ()


def test_more_ports_than_upper_switches_share_links_evenly() -> None:
    assert busiest_link(hdrm(Collective("all_reduce", 64), upper=4, ports=8), 4, 8) == 2
    assert busiest_link(hdrm(Collective("all_reduce", 64), upper=2, ports=16), 2, 16) == 8


@pytest.mark.parametrize("order", ["halving", "doubling"])
def test_on_a_leaf_spine_of_equal_size_flows_of_plain_halving_doubling_collide(order: str) -> None:
    collective = Collective("all_reduce", 64)
    mapped = link_loads(hdrm(collective, upper=8, ports=4, order=order), load("bigraph:upper=8,ports=4"), 1e6)
    plain = link_loads(halving_doubling(collective, order=order), load("leafspine:leaves=8,ports=8"), 1e6)
    assert {step.most_flows for step in mapped} == {1}
    assert max(step.most_flows for step in plain) >= 3  # paths are chosen for each flow, by a hash
    assert sum(step.seconds for step in plain) > 1.2 * sum(step.seconds for step in mapped)


def test_plain_halving_doubling_leaves_the_direct_links() -> None:
    assert busiest_link(halving_doubling(Collective("all_reduce", 64)), 8, 4) == -1


def test_every_rank_has_one_place() -> None:
    for upper, ports in SHAPES:
        assert sorted(hdrm_places(upper, ports)) == list(range(2 * upper * ports))


def test_places_of_eight_ranks() -> None:
    # r = v*4 + 2*i + b; even number of ones -> upper (i + v) mod 2, odd -> lower i, two slots a switch
    assert hdrm_places(2, 2).tolist() == [0, 4, 6, 2, 5, 3, 1, 7]


def test_default_shape_has_no_more_ports_than_upper_switches() -> None:
    schedule = hdrm(Collective("all_reduce", 32))
    assert busiest_link(schedule, 4, 4) == 1


@pytest.mark.parametrize(("world", "parameters"), [(6, {}), (16, {"upper": 4, "ports": 4}), (24, {"upper": 3})])
def test_other_worlds_are_refused_with_a_reason(world: int, parameters: dict[str, int]) -> None:
    with pytest.raises(ScheduleError, match="powers of two.*halving_doubling"):
        hdrm(Collective("all_reduce", world), **parameters)
