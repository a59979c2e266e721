"""Chooses, of regions that overlap, those that are cut."""

from __future__ import annotations

from typing import Any

import networkx as nx  # type: ignore[import-untyped]
from torch import nn

from ._regions import Region


def disjoint(regions: list[Region]) -> list[Region]:
    """Return regions that share no layers, so that most layers are in one, and then most parameters.

    Where each region overlaps the next only, as in a chain of layers, the choice is the best there is (the independent
    set of greatest weight in a forest); otherwise the largest come first.
    """
    overlaps = nx.Graph()
    overlaps.add_nodes_from(range(len(regions)))
    users: dict[nn.Module | nn.Parameter, list[int]] = {}
    for i, region in enumerate(regions):
        for module in region.members:
            overlaps.add_edges_from((i, other) for other in users.get(module, ()))
            users.setdefault(module, []).append(i)
    weights = [(region.weights, region.parameters) for region in regions]
    chosen: list[int] = []
    for part in nx.connected_components(overlaps):
        tree = overlaps.subgraph(part)
        if nx.is_tree(tree):
            chosen += _independent(tree, weights)
        else:
            for i in sorted(part, key=lambda i: weights[i], reverse=True):
                if not any(overlaps.has_edge(i, other) for other in chosen):
                    chosen.append(i)
    return [regions[i] for i in chosen]


def _independent(tree: Any, weights: list[tuple[int, int]]) -> list[int]:
    """Return the heaviest nodes of a tree of which no two are neighbours."""
    root = min(tree)
    parents = {child: parent for parent, child in nx.dfs_edges(tree, root)}
    without: dict[int, tuple[tuple[int, int], list[int]]] = {}
    best: dict[int, tuple[tuple[int, int], list[int]]] = {}
    for node in nx.dfs_postorder_nodes(tree, root):
        children = [c for c in tree.neighbors(node) if c != parents.get(node)]
        without[node] = _together([best[c] for c in children])
        taken = _together([without[c] for c in children] + [(weights[node], [node])])
        best[node] = max(taken, without[node], key=lambda option: option[0])
    return best[root][1]


def _together(options: list[tuple[tuple[int, int], list[int]]]) -> tuple[tuple[int, int], list[int]]:
    weight = sum(w for (w, _), _ in options), sum(p for (_, p), _ in options)
    return weight, [node for _, nodes in options for node in nodes]
