"""Aggregation trees: which switch reduces for which ranks, up to one root."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._cluster import Cluster
from ._errors import ClusterError
from ._routes import ragged

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class AggregationTree:
    """Switches that reduce on the way up, and multicast on the way down.

    Attributes:
        switches: int64, the nodes of the cluster that take part; the root first, every parent before its children.
        names: Names of those switches.
        parents: int64; `parents[i]` is the position in `switches` of the parent of `switches[i]`, -1 for the root.
        rank_parents: int64, of every rank asked for the position in `switches` that it sends to.
        depth: Levels of edges from the farthest rank to the root: 1 when all hang on the root.
    """

    switches: Indices
    names: tuple[str, ...]
    parents: Indices
    rank_parents: Indices
    depth: int

    def __str__(self) -> str:
        """Return the tree as indented text; a switch's ranks are counted."""
        leaves = np.bincount(self.rank_parents, minlength=len(self.switches))
        lines: list[str] = [f"depth {self.depth}, {len(self.switches)} switches, {len(self.rank_parents)} ranks"]
        children: list[list[int]] = [[] for _ in self.switches]
        for child, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                children[parent].append(child)
        stack = [(0, 0)]
        while stack:
            position, level = stack.pop()
            lines.append("  " * level + self.names[position] + (f": {leaves[position]} ranks" * bool(leaves[position])))
            stack.extend((child, level + 1) for child in reversed(children[position]))
        return "\n".join(lines)


def aggregation_tree(cluster: Cluster, ranks: Sequence[int] | Indices | None = None) -> AggregationTree:
    """Return a reduction tree over a cluster's switches that reduce, which spans some ranks, or all.

    Its root is the reducing switch from which the farthest rank is nearest, the first of several; every rank and
    switch climbs along its shortest way to the root, so equal questions get equal trees.

    Raises:
        ClusterError: if no switch reduces, a rank is outside, or a rank cannot reach one.
    """
    asked = np.arange(cluster.world) if ranks is None else np.asarray(ranks, dtype=np.int64)
    if not len(asked) or asked.min() < 0 or asked.max() >= cluster.world:
        raise ClusterError(f"{cluster.name}: a tree spans at least one of the ranks 0..{cluster.world - 1}")
    if not cluster.reductions:
        raise ClusterError(
            f"{cluster.name}: none of its switches reduces; give some a `reduction` (a builder: reduction=true)"
        )
    leaves = cluster.ranks[asked]
    reducing = np.array(sorted(cluster.reductions), dtype=np.int64)
    farthest = _farthest(cluster, reducing, leaves)
    root = int(reducing[int(np.argmin(farthest))])
    if farthest.min() >= _FAR:
        raise ClusterError(f"{cluster.name}: no reducing switch is reached by all of the {len(leaves)} ranks")
    routes = cluster.router.routes(leaves, np.full(len(leaves), root), 0)
    capable = np.zeros(len(cluster), dtype=bool)
    capable[reducing] = True
    above: dict[int, int] = {root: -1}
    first = np.empty(len(leaves), dtype=np.int64)
    for leaf in range(len(leaves)):
        heads = cluster.link_head[routes[leaf]]
        way = [int(node) for node in heads[capable[heads]]]
        if not way:  # the leaf is the root itself
            way = [root]
        first[leaf] = way[0]
        for node, parent in itertools.pairwise(way):
            if node in above:  # the way on from here is known, and is the same
                break
            above[node] = parent
    return _number(cluster, root, above, first)


_FAR = 2**29


def _farthest(cluster: Cluster, roots: Indices, leaves: Indices) -> Indices:
    """Return the hops from each candidate to the farthest leaf; breadth first over the nodes that pass things on."""
    count = len(cluster)
    onward = np.flatnonzero(cluster.forwards[cluster.link_tail])
    order = onward[np.argsort(cluster.link_head[onward], kind="stable")]
    start = np.searchsorted(cluster.link_head[order], np.arange(count + 1))
    # An endpoint is one hop further than the nearest that it sends to; many endpoints send to the same one.
    ends = leaves[~cluster.forwards[leaves]]
    is_end = np.zeros(count, dtype=bool)
    is_end[ends] = True
    away = np.flatnonzero(is_end[cluster.link_tail])
    away = away[np.argsort(cluster.link_tail[away], kind="stable")]
    head, first = cluster.link_head[away], np.unique(cluster.link_tail[away], return_index=True)[1]
    result = np.full(len(roots), _FAR, dtype=np.int64)
    if len(first) < len(np.unique(ends)):  # one of them sends to nobody
        return result
    for row, root in enumerate(roots.tolist()):
        distance = np.full(count, _FAR, dtype=np.int64)
        distance[root] = 0
        frontier, level = np.array([root]), 0
        while len(frontier):
            level += 1
            _, position = ragged(start[frontier], start[frontier + 1] - start[frontier])
            tails = np.unique(cluster.link_tail[order[position]])
            frontier = tails[distance[tails] == _FAR]
            distance[frontier] = level
        passing = distance[leaves[cluster.forwards[leaves]]]
        ending = np.minimum.reduceat(distance[head], first) + 1 if len(first) else passing
        result[row] = max(int(part.max()) for part in (passing, ending) if len(part))
    return result


def _number(cluster: Cluster, root: int, above: dict[int, int], first: Indices) -> AggregationTree:
    """Give numbers to the switches from the root, level by level and by index within a level."""
    children: dict[int, list[int]] = {}
    for node, parent in above.items():
        children.setdefault(parent, []).append(node)
    order, level, depth = [root], {root: 0}, 0
    for node in order:
        for child in sorted(children.get(node, [])):
            level[child] = level[node] + 1
            order.append(child)
    position = {node: index for index, node in enumerate(order)}
    depth = max(level[int(node)] for node in np.unique(first)) + 1
    return AggregationTree(
        switches=np.array(order, dtype=np.int64),
        names=tuple(cluster.node_names[node] for node in order),
        parents=np.array([position.get(above[node], -1) for node in order], dtype=np.int64),
        rank_parents=np.array([position[int(node)] for node in first], dtype=np.int64),
        depth=depth,
    )
