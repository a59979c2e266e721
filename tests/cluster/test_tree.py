"""Aggregation trees span the ranks, over reducing switches only, the same every time."""

import numpy as np
import pytest

from hocket import cluster
from hocket.cluster import ClusterError


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("spec", "depth", "switches"),
    [
        ("star:hosts=5,reduction=true", 1, 1),
        ("leafspine:leaves=4,ports=3,reduction=true", 2, 5),
        ("fattree:k=4,reduction=true", 3, 13),
        ("bigraph:upper=4,ports=2,reduction=true", 3, 8),
        ("single:server=dgx-h100", 1, 1),
        ("sharp-1500", 3, 90),
    ],
)
def test_a_tree_spans_all_ranks(spec: str, depth: int, switches: int) -> None:
    described = cluster.load(spec)
    tree = cluster.aggregation_tree(described)
    assert (tree.depth, len(tree.switches)) == (depth, switches)
    assert len(tree.rank_parents) == described.world
    assert tree.parents[0] == -1
    assert (tree.parents[1:] < np.arange(1, switches)).all()
    assert (tree.parents[1:] >= 0).all()
    assert all(int(node) in described.reductions for node in tree.switches)
    assert [described.node(name) for name in tree.names] == tree.switches.tolist()
    again = cluster.aggregation_tree(described)
    assert (tree.parents == again.parents).all()
    assert (tree.switches == again.switches).all()


def test_a_tree_of_few_ranks_uses_few_switches() -> None:
    described = cluster.load("leafspine:leaves=4,ports=3,reduction=true")
    under_one_leaf = cluster.aggregation_tree(described, [0, 1])
    assert under_one_leaf.names == ("leaf0",)
    across = cluster.aggregation_tree(described, [0, 11])
    assert across.depth == 2
    assert set(across.names[1:]) == {"leaf0", "leaf3"}


def test_a_tree_passes_switches_that_do_not_reduce() -> None:
    text = """
    [[nodes]]
    name = "a"
    [[nodes]]
    name = "b"
    [[nodes]]
    name = "plain"
    kind = "switch"
    [[nodes]]
    name = "able"
    kind = "switch"
    reduction = true
    """
    links = "".join(
        f'[[links]]\nends = ["{a}", "{b}"]\nbandwidth = 1e9\n'
        for a, b in (("a", "plain"), ("b", "plain"), ("plain", "able"))
    )
    tree = cluster.aggregation_tree(cluster.from_toml(text + links))
    assert tree.names == ("able",)
    assert tree.depth == 1


def test_trees_that_cannot_be_are_refused() -> None:
    with pytest.raises(ClusterError, match="none of its switches reduces"):
        cluster.aggregation_tree(cluster.load("star:hosts=2"))
    with pytest.raises(ClusterError, match=r"ranks 0\.\.1"):
        cluster.aggregation_tree(cluster.load("star:hosts=2,reduction=true"), [2])
    with pytest.raises(ClusterError, match="no reducing switch is reached by all"):
        cluster.aggregation_tree(cluster.load("rails:hosts=2,server=dgx-h100"))


def test_a_tree_shows_its_levels() -> None:
    text = str(cluster.aggregation_tree(cluster.load("leafspine:leaves=2,ports=2,reduction=true")))
    assert text.splitlines() == ["depth 2, 3 switches, 4 ranks", "spine0", "  leaf0: 2 ranks", "  leaf1: 2 ranks"]
