"""Steps are laid over the links of a network, and flows that share one are counted."""

from dataclasses import dataclass

import numpy as np
import pytest

from hocket.schedule import Collective, Schedule, ScheduleError, Step, link_loads

from .brute_force import ring


@dataclass
class Paths:
    offsets: np.ndarray
    links: np.ndarray


class TwoSwitches:
    """Ranks 0, 1 under one switch (node 4), 2, 3 under another (node 5), one trunk between them."""

    ranks = np.arange(4)
    link_names = tuple(f"up{r}" for r in range(4)) + tuple(f"down{r}" for r in range(4)) + ("4->5", "5->4")
    capacity_Bps = np.full(10, 1e9)
    latency_s = np.full(10, 1e-6)

    def node(self, name):
        return {"left": 4, "right": 5}[name]

    def routes(self, source, destination):
        links, offsets = [], [0]
        for s, d in zip(source.tolist(), destination.tolist(), strict=True):
            path = [s] if s < 4 else []
            here, there = (s // 2 if s < 4 else s - 4), (d // 2 if d < 4 else d - 4)
            path += [8 + here] if here != there else []
            path += [4 + d] if d < 4 else []
            links += path
            offsets.append(len(links))
        return Paths(np.array(offsets), np.array(links, dtype=np.int64))


def test_a_ring_in_order_crosses_the_trunk_once_each_way():
    first, second = link_loads(ring(4), TwoSwitches(), 4e6)
    assert (first.step, first.repeat, first.flows, first.hops, first.most_flows) == (0, 3, 4, 3, 1)
    assert second.step == 3
    assert first.seconds == pytest.approx(3e-6 + 1e-3)


def test_flows_that_share_a_link_share_its_bytes():
    cross = Schedule("cross", Collective("all_reduce", 4), 1, (Step.of([0, 1], [2, 3], reduce=True),))
    (load,) = link_loads(cross, TwoSwitches(), 1e6)
    assert (load.most_flows, load.busiest) == (2, "4->5")
    assert load.seconds == pytest.approx(3e-6 + 2e-3)


def test_chunks_from_one_endpoint_to_another_are_one_flow_and_switches_are_found_by_name():
    step = Step.of([0, 0], [4, 4], [0, 1], reduce=True)
    schedule = Schedule("up", Collective("all_reduce", 4), 2, (step,), ("left",))
    (load,) = link_loads(schedule, TwoSwitches(), 2e6)
    assert (load.flows, load.hops, load.most_flows) == (1, 1, 1)
    assert load.seconds == pytest.approx(1e-6 + 2e-3)


def test_what_the_network_lacks_is_named():
    with pytest.raises(ScheduleError, match="places for 4 ranks and the schedule 5"):
        link_loads(ring(5), TwoSwitches())
    with pytest.raises(ScheduleError, match="no switch 'core'"):
        link_loads(Schedule("up", Collective("all_reduce", 4), 1, (), ("core",)), TwoSwitches())
