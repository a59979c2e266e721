"""The compiled loop does what the plain one does."""

import numpy as np
import pytest

from hocket import algorithms, cluster
from hocket.schedule import Collective
from hocket.simulate import Settings, _loop, simulate_flows, simulate_schedule

pytest.importorskip("numba", reason="numba is not installed; pip install hocket[fast]")


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return monkeypatch


@pytest.mark.parametrize(
    ("spec", "name", "options"),
    [
        ("leafspine:leaves=4,ports=4", "halving_doubling", Settings()),
        ("bigraph:upper=4,ports=4", "ring", Settings()),
        ("star:hosts=2,server=commodity,server.devices=4", "direct", Settings(congestion=0.05)),
        ("torus:dims=4x4", "double_tree", Settings(weigh_by_latency=True, window_nbytes=1e4, overhead_s=1e-6)),
        ("dragonfly+:groups=3,leaves=2,spines=2,ports=2,globals=1", "halving_doubling", Settings.lv08()),
    ],
)
def test_schedules_end_at_the_same_times(switch: pytest.MonkeyPatch, spec: str, name: str, options: Settings) -> None:
    described = cluster.load(spec)
    schedule = algorithms.get(name)(Collective("all_reduce", described.world))
    ends = []
    for least in (0, 10**9):
        switch.setattr(_loop, "_MANY", least)
        timing = simulate_schedule(schedule, described, 1e6, settings=options, seed=3)
        ends.append((timing.start_s, timing.moving_s, timing.end_s))
    for compiled, plain in zip(*ends, strict=True):
        assert compiled == pytest.approx(plain, rel=1e-9)


def test_a_late_rank_s_queues_are_the_same(switch: pytest.MonkeyPatch) -> None:
    schedule = algorithms.get("ring")(Collective("all_reduce", 16))
    described = cluster.load("leafspine:leaves=4,ports=4")
    ends = []
    for least in (0, 10**9):
        switch.setattr(_loop, "_MANY", least)
        late = [0.003 * (rank % 3 == 1) for rank in range(16)]
        ends.append(simulate_schedule(schedule, described, 1e7, ready_s=late).end_s)
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)


def test_random_flows_end_at_the_same_times(switch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(2)
    described = cluster.load("fattree:k=4")
    source = random.integers(0, 16, 300)
    destination = (source + random.integers(1, 16, 300)) % 16
    nbytes, start = 10 ** random.uniform(0, 8, 300), random.uniform(0, 0.1, 300)
    ends = []
    for least in (0, 10**9):
        switch.setattr(_loop, "_MANY", least)
        outcome = simulate_flows(
            described, described.ranks[source], described.ranks[destination], nbytes, start_s=start
        )
        ends.append(outcome.end_s)
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)
