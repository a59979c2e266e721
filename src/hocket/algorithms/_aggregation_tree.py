"""Aggregation tree: switches reduce what comes from below and multicast what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hocket.schedule import Collective, Schedule, ScheduleError, Step

from ._algorithm import Form, algorithm
from ._steps import mirrored, pipelined

if TYPE_CHECKING:
    from hocket.cluster import Cluster

Parents = NDArray[np.int64]


def switch_tree(world: int, arity: int = 32) -> tuple[Parents, tuple[str, ...]]:
    """A tree of switches over `world` ranks, with up to `arity` children each, filled from the left.

    Returns:
        The parents of ranks and switches, -1 at the top, and the names of the switches, `s1.0` ... from below.
    """
    parents, names, level, width, first = [], [], 0, world, 0
    while width > 1 or level == 0:
        above, level = -(-width // arity), level + 1
        parents.append(first + width + np.arange(width) // arity)
        names += [f"s{level}.{i}" for i in range(above)]
        first, width = first + width, above
    return np.concatenate([*parents, [-1]]), tuple(names)


def cluster_tree(
    cluster: Cluster, ranks: Sequence[int] | NDArray[np.int64] | None = None
) -> tuple[Parents, tuple[str, ...]]:
    """The tree of a cluster's switches over some of its ranks, or all, in the form that `aggregation_tree` takes.

    Returns:
        The parents of ranks and switches, -1 at the top, and the names of the switches.

    Raises:
        ClusterError: no switch reduces, or a rank cannot reach one.
    """
    tree = cluster.aggregation_tree(ranks)
    world = len(tree.rank_parents)
    return np.concatenate([tree.rank_parents + world, np.where(tree.parents < 0, -1, tree.parents + world)]), tree.names


def _tree(
    world: int, parents: ArrayLike | None, switches: Sequence[str] | None, arity: int
) -> tuple[Parents, tuple[str, ...]]:
    """The tree, checked. Parts without ranks, and all above the lowest switch over all ranks, are left out as -2."""
    above, names = switch_tree(world, arity)
    if parents is not None:
        above = np.array(parents, np.int64)
        names = tuple(switches) if switches is not None else tuple(f"s{i}" for i in range(len(above) - world))
    if above.shape != (world + len(names),):
        raise ScheduleError(
            f"aggregation_tree: parents has shape {above.shape}; give one number for each of {world} ranks and "
            f"{len(names)} switches"
        )
    tops = np.flatnonzero(above < 0)
    if len(tops) != 1 or tops[0] < world:
        raise ScheduleError(f"aggregation_tree: {tops.tolist()} have no parent (-1); one switch must be the top")
    for child in np.flatnonzero((above >= 0) & ((above < world) | (above >= len(above)))):
        raise ScheduleError(f"aggregation_tree: the parent of {child} is {above[child]}, which is no switch")
    deep = _depths(above)
    below = np.zeros(len(above), np.int64)  # ranks below
    below[:world] = 1
    for level in range(int(deep.max()), 0, -1):
        at = np.flatnonzero(deep == level)
        np.add.at(below, above[at], below[at])
    above[below == 0] = -2
    above[(below == world) & (np.arange(len(above)) >= world)] = -2
    whole = np.flatnonzero((below == world) & (np.arange(len(above)) >= world))
    above[whole[np.argmax(deep[whole])]] = -1
    return above, names


def _depths(above: Parents) -> Parents:
    """Links from each endpoint to the top."""
    deep, at = np.zeros(len(above), np.int64), above.copy()
    most = len(np.unique(above))  # a way up meets each inner endpoint once
    while (at >= 0).any():
        deep += at >= 0
        if deep.max() > most:
            raise ScheduleError(f"aggregation_tree: the parents of {int(deep.argmax())} go round in a circle")
        at = np.where(at >= 0, above[at], -1)
    return deep


def _rooted(above: Parents, root: int) -> Parents:
    """The tree hung up at rank `root`."""
    turned, here, before = above.copy(), root, -1
    while here >= 0:
        turned[here], before, here = before, here, int(above[here])
    return turned


def _form(
    collective: Collective,
    *,
    parents: ArrayLike | None = None,
    switches: Sequence[str] | None = None,
    arity: int = 32,
    pieces: int = 1,
) -> Form:
    p, root = collective.world, collective.root
    above, _ = _tree(p, parents, switches, arity)
    deep = _depths(above)[:p]
    hops = 2 * int(deep.max())
    if collective.rooted:
        meet, shared = np.arange(p), np.zeros(p, np.int64)  # depth of the lowest switch over a rank and the root
        over_root: list[int] = [root]
        while above[over_root[-1]] >= 0:
            over_root.append(int(above[over_root[-1]]))
        for _ in range(int(deep.max())):
            meet = np.where(np.isin(meet, over_root), meet, above[meet])
        for links, switch in enumerate(reversed(over_root)):
            shared[meet == switch] = links
        hops = int((deep + deep[root] - 2 * shared).max())
    passed = Fraction(hops + pieces - 1, pieces)
    return Form(hops + pieces - 1, Fraction(1), passed, Fraction(int(collective.kind == "reduce")))


def _limit(
    collective: Collective,
    *,
    parents: ArrayLike | None = None,
    switches: Sequence[str] | None = None,
    arity: int = 32,
    pieces: int = 1,
) -> str | None:
    if arity < 2:
        return f"arity={arity}; give 2 or more"
    return None if pieces >= 1 else f"pieces={pieces}; give 1 or more"


@algorithm(
    title="Aggregation tree in switches",
    source="Graham et al., Scalable Hierarchical Aggregation Protocol (SHARP), COMHPC 2016",
    kinds=("all_reduce", "reduce", "broadcast", "barrier"),
    form=_form,
    limit=_limit,
    variants=tuple({"pieces": pieces} for pieces in (1, 4, 16, 64)),
    in_network=True,
)
def aggregation_tree(
    collective: Collective,
    *,
    parents: ArrayLike | None = None,
    switches: Sequence[str] | None = None,
    arity: int = 32,
    pieces: int = 1,
) -> Schedule:
    """Builds: up with reduction as children arrive, down with multicast from the lowest switch over all ranks.

    broadcast spreads from the root along the tree without going over the top, and reduce is its mirror image.

    Args:
        collective: all_reduce, reduce, broadcast or barrier of any world.
        parents: `(world + switches,)`, the switch over each rank and switch, -1 at the top, as `cluster_tree` gives
            it; by default a tree that `switch_tree` makes.
        switches: their names; by default s0, s1 ...
        arity: children a switch of the default tree.
        pieces: into how many pieces the vector is cut, which follow each other through the levels (streaming).

    Raises:
        ScheduleError: `parents` is no tree of switches over the ranks.
    """
    above, names = _tree(collective.world, parents, switches, arity)
    if collective.rooted:
        stages = _down(_rooted(above, collective.root))
        if collective.kind == "reduce":
            stages = mirrored(stages, reduce=True)
    else:
        stages = [*_up(above), *_down(above)]
    return Schedule("aggregation_tree", collective, pieces, tuple(pipelined(stages, pieces)), names)


def _down(above: Parents) -> list[Step]:
    deep = _depths(above)
    levels = [np.flatnonzero((deep == level) & (above >= 0)) for level in range(1, int(deep.max()) + 1)]
    return [Step.of(above[at], at, reduce=False) for at in levels]


def _up(above: Parents) -> list[Step]:
    """A switch sends on in the step after the last of its children has sent."""
    deep = _depths(above)
    height = np.zeros(len(above), np.int64)
    for level in range(int(deep.max()), 0, -1):
        at = np.flatnonzero((deep == level) & (above >= 0))
        np.maximum.at(height, above[at], height[at] + 1)
    levels = [np.flatnonzero((height == step) & (above >= 0)) for step in range(int(height.max()))]
    return [Step.of(at, above[at], reduce=True) for at in levels]
