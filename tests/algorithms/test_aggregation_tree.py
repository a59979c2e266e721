from __future__ import annotations

import numpy as np
import pytest

from hocket.algorithms import aggregation_tree, cluster_tree, switch_tree
from hocket.cluster import load
from hocket.schedule import Collective, Schedule, ScheduleError, link_loads, verify

from .numpy_world import expected, run

# Ranks 0-2 below switch 4, rank 3 below 5, both below 6, which is below 7; switch 8 has nobody below.
UNEVEN = [4, 4, 4, 5, 6, 6, 7, -1, 7]


def rows(schedule: Schedule) -> list[list[str]]:
    return [
        [f"{schedule.endpoint(a)}>{schedule.endpoint(b)}" for a, b in zip(step.source, step.destination, strict=True)]
        for step in schedule.each_step()
    ]


def test_switch_tree_is_filled_from_the_left() -> None:
    parents, names = switch_tree(5, arity=2)
    assert names == ("s1.0", "s1.1", "s1.2", "s2.0", "s2.1", "s3.0")
    assert parents.tolist() == [5, 5, 6, 6, 7, 8, 8, 9, 10, 10, -1]


def test_up_level_by_level_then_down_without_what_holds_no_rank_or_all() -> None:
    schedule = aggregation_tree(Collective("all_reduce", 4), parents=UNEVEN, switches=["a", "b", "c", "d", "e"])
    assert rows(schedule) == [
        ["0>a", "1>a", "2>a", "3>b"],
        ["a>c", "b>c"],
        ["c>a", "c>b"],
        ["a>0", "a>1", "a>2", "b>3"],
    ]
    assert schedule.switches == ("a", "b", "c", "d", "e")


def test_a_broadcast_turns_at_the_first_common_switch() -> None:
    assert rows(aggregation_tree(Collective("broadcast", 4, 3), parents=UNEVEN)) == [
        ["3>s1"],
        ["s1>s2"],
        ["s2>s0"],
        ["s0>0", "s0>1", "s0>2"],
    ]


def test_one_switch_over_all_ranks_of_a_group_is_enough() -> None:
    schedule = aggregation_tree(Collective("all_reduce", 3), parents=[3, 3, 3, 5, 5, -1])
    assert rows(schedule) == [["0>s0", "1>s0", "2>s0"], ["s0>0", "s0>1", "s0>2"]]


@pytest.mark.parametrize("kind", aggregation_tree.kinds)
def test_random_trees_carry_out_the_contract(kind: str) -> None:
    generator = np.random.default_rng(7)
    for case in range(60):
        world, switches = int(generator.integers(1, 20)), int(generator.integers(1, 12))
        above = [int(generator.integers(world, world + switches)) for _ in range(world)]
        above += [-1] + [world + int(generator.integers(0, i)) for i in range(1, switches)]
        root = int(generator.integers(0, world)) if Collective(kind, world).rooted else 0
        collective, parameters = Collective(kind, world, root), {"parents": above, "pieces": 1 + case % 3}
        schedule = aggregation_tree(collective, **parameters)
        data = generator.integers(0, 1000, (world, schedule.chunks, 1))
        value, must = expected(collective, schedule.chunks, data, "sum")
        assert (run(schedule, data, "sum") == value).all(axis=2)[must].all()
        assert schedule.step_count == aggregation_tree.steps(collective, **parameters)


@pytest.mark.parametrize(
    ("parents", "reason"),
    [
        ([2, 2], "shape"),
        ([2, 2, -1, -1], "one switch must be the top"),
        ([2, -1, -1], "one switch must be the top"),
        ([2, 0, -1], "the parent of 1 is 0, which is no switch"),
        ([2, 9, -1], "the parent of 1 is 9"),
        ([2, 2, 3, 2, -1], "round in a circle"),
    ],
)
def test_what_is_no_tree_is_refused(parents: list[int], reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        aggregation_tree(
            Collective("all_reduce", 2), parents=parents, switches=[f"s{i}" for i in range(max(1, len(parents) - 2))]
        )


def test_leaders_stand_for_their_hosts() -> None:
    schedule = aggregation_tree(Collective("all_reduce", 6), local=2)
    assert rows(schedule) == [
        ["1>0", "3>2", "5>4"],
        ["0>s1.0", "2>s1.0", "4>s1.0"],
        ["s1.0>0", "s1.0>2", "s1.0>4"],
        ["0>1", "2>3", "4>5"],
    ]
    assert rows(aggregation_tree(Collective("broadcast", 4, 3), local=2)) == [["3>2", "3>s1.0"], ["s1.0>0"], ["0>1"]]
    with pytest.raises(ScheduleError, match="a host alone needs no switch"):
        aggregation_tree(Collective("all_reduce", 4), local=4)
    with pytest.raises(ScheduleError, match="give one of them"):
        aggregation_tree(Collective("all_reduce", 4), local=2, pieces=2)


def test_the_switches_of_a_cluster_reduce_for_a_part_of_its_ranks() -> None:
    cluster = load("selene-like")
    parents, switches = cluster_tree(cluster, range(100))
    schedule = aggregation_tree(Collective("all_reduce", 100), parents=parents, switches=switches)
    assert verify(schedule) == ()
    assert set(schedule.switches) <= set(cluster.node_names)
    assert all(load.most_flows == 1 for load in link_loads(schedule, cluster))
