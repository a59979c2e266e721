from __future__ import annotations

import numpy as np
import pytest

from hocket.algorithms import double_tree, double_tree_parents
from hocket.schedule import Collective


def depth(parent: list[int], rank: int) -> int:
    return 0 if parent[rank] < 0 else 1 + depth(parent, parent[rank])


@pytest.mark.parametrize("world", range(2, 130))
def test_depth_and_inner_ranks_are_as_published(world: int) -> None:
    inner = []
    for tree in double_tree_parents(world).tolist():
        assert tree.count(-1) == 1
        assert max(depth(tree, rank) for rank in range(world)) == (world - 1).bit_length()
        assert max(np.bincount([one for one in tree if one >= 0])) <= 2
        inner.append({parent for parent in tree if parent >= 0})
    assert len(inner[0] & inner[1]) == world % 2


def test_trees_of_four_ranks_are_those_of_the_paper() -> None:
    assert double_tree_parents(4).tolist() == [[-1, 2, 0, 2], [1, 3, 1, -1]]


def test_a_full_pipeline_is_stored_once() -> None:
    schedule = double_tree(Collective("all_reduce", 64), pieces=1000)
    assert schedule.step_count == 2 * 6 + 999
    assert len(schedule.steps) == 2 * (2 * 6 - 1) + 1
