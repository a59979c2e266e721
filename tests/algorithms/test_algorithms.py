from __future__ import annotations

import numpy as np
import pytest

from hocket import algorithms
from hocket.algorithms import candidates, direct, double_tree, get, halving_doubling, hdrm, ring
from hocket.schedule import KINDS, Collective, ScheduleError, Wire, parse

from ..pace import timed


def test_ring_of_four_is_the_ring_of_msccl() -> None:
    schedule = ring(Collective("all_reduce", 4))
    rank0 = [(int(s.start[s.source == 0][0]), int(s.start[s.destination == 0][0])) for s in schedule.each_step()]
    assert rank0 == [(0, 3), (3, 2), (2, 1), (1, 0), (0, 3), (3, 2)]  # (sends, receives)


def test_a_ring_is_stored_as_two_steps() -> None:
    assert len(ring(Collective("all_reduce", 4096)).steps) == 2
    assert len(ring(Collective("reduce_scatter", 4096)).steps) == 1
    assert len(ring(Collective("all_reduce", 7), rings=6).steps) == 2


def test_rings_use_different_neighbours() -> None:
    first = ring(Collective("all_reduce", 8), rings=4).steps[0]
    assert sorted(first.destination[first.source == 0].tolist()) == [1, 3, 5, 7]


def test_rings_in_given_orders() -> None:
    schedule = ring(Collective("all_gather", 4), orders=[[2, 0, 3, 1], [0, 1, 2, 3]])
    first = schedule.steps[0]
    assert list(zip(first.source.tolist(), first.destination.tolist(), first.start.tolist(), strict=True)) == [
        *[(2, 0, 4), (0, 3, 0), (3, 1, 6), (1, 2, 2)],
        *[(0, 1, 1), (1, 2, 3), (2, 3, 5), (3, 0, 7)],
    ]
    with pytest.raises(ScheduleError, match="order of the ranks 0 to 3"):
        ring(Collective("all_gather", 4), orders=[[0, 1, 2, 2]])


@pytest.mark.parametrize("world", [1, 2, 3, 7, 8, 12, 130])
@pytest.mark.parametrize("kind", KINDS)
def test_every_contract_is_served(kind: str, world: int) -> None:
    for root in {0, world - 1} if Collective(kind, world).rooted else {0}:
        collective = Collective(kind, world, root)
        assert "direct" in [one.name for one in candidates(collective)]
        assert all(one.serves(collective) is None and not one.in_network for one in candidates(collective))


def test_switches_that_reduce_make_more_candidates() -> None:
    collective = Collective("barrier", 8)
    more = set(candidates(collective, in_network=True)) - set(candidates(collective))
    assert [one.name for one in more] == ["aggregation_tree"]


def test_one_rank_transfers_nothing() -> None:
    for one in algorithms.algorithms():
        for kind in one.kinds:
            schedule = one(Collective(kind, 1))
            assert schedule.steps == ()
            assert one.cost(Collective(kind, 1), 1 << 20, Wire(1e-6, 1e-9)) == 0


def test_schedules_are_deterministic_and_round_trip() -> None:
    for one in algorithms.algorithms():
        collective = Collective(one.kinds[0], 8)
        parameters = {"local": 2} if "local" in one.parameters else {}
        assert parse(str(one(collective, **parameters))) == one(collective, **parameters)


@pytest.mark.parametrize(
    ("name", "world", "limit_s"),
    [
        ("halving_doubling", 65536, 2),
        ("hdrm", 65536, 2),
        ("double_tree", 65536, 2),
        ("ring", 4096, 0.5),
        ("aggregation_tree", 60000, 1),
    ],
)
def test_large_worlds_build_fast(name: str, world: int, limit_s: float) -> None:
    schedule, took_s = timed(lambda: get(name)(Collective("all_reduce", world)))
    assert schedule.world == world
    assert took_s < limit_s


def test_reasons_name_the_algorithm_the_value_and_a_way_out() -> None:
    assert ring.serves(Collective("gather", 4)) == "ring serves all_reduce, reduce_scatter, all_gather, not gather"
    assert "rings=0" in (ring.serves(Collective("all_reduce", 4), rings=0) or "")
    assert "circulant" in (halving_doubling.serves(Collective("all_gather", 6)) or "")
    assert halving_doubling.serves(Collective("all_gather", 8)) is None
    with pytest.raises(ScheduleError, match="no parameter 'colour'; there are: rings, orders"):
        ring(Collective("all_reduce", 4), colour=3)
    with pytest.raises(ScheduleError, match="'up'"):
        hdrm(Collective("all_reduce", 8), order="up")
    with pytest.raises(ScheduleError, match="pieces=0"):
        double_tree(Collective("all_reduce", 8), pieces=0)
    with pytest.raises(ScheduleError, match="'rign' is unknown; there are one_shot, direct, ring"):
        get("rign")


def test_every_algorithm_says_where_it_is_from() -> None:
    for name, one in algorithms.REGISTRY.items():
        assert one.name == name
        assert one.title
        assert any(year in one.source for year in map(str, range(1980, 2030)))
        assert "Build" in one.description


def test_costs_are_the_formulas_of_the_literature() -> None:
    alpha, beta, gamma, p, nbytes = 3e-6, 1e-10, 2e-11, 16, 1 << 20
    wire, all_reduce = Wire(alpha, beta, gamma), Collective("all_reduce", p)
    moved = (p - 1) / p * nbytes
    for name, seconds in {
        "ring": 2 * (p - 1) * alpha + 2 * moved * beta + moved * gamma,
        "direct": 2 * alpha + 2 * moved * beta + moved * gamma,
        "one_shot": alpha + (p - 1) * nbytes * (beta + gamma),
        "recursive_doubling": 4 * (alpha + nbytes * (beta + gamma)),
        "halving_doubling": 8 * alpha + 2 * moved * beta + moved * gamma,
        "hdrm": 8 * alpha + 2 * moved * beta + moved * gamma,
    }.items():
        assert np.isclose(get(name).cost(all_reduce, nbytes, wire), seconds, rtol=1e-12), name
    assert direct.sent(all_reduce) == ring.sent(all_reduce)
