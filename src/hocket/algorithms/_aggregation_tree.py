"""Aggregation tree: switches reduce what comes from below and multicast what comes back."""

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hocket.schedule import Collective, Schedule, ScheduleError, Step

from ._algorithm import ClosedForm, algorithm
from ._steps import mirrored, pipelined

if TYPE_CHECKING:
    from hocket.cluster import Cluster

Parents = NDArray[np.int64]


def switch_tree(world: int, arity: int = 32) -> tuple[Parents, tuple[str, ...]]:
    """Return a tree of switches over `world` ranks, with up to `arity` children each, filled from the left.

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
    cluster: "Cluster", ranks: Sequence[int] | NDArray[np.int64] | None = None
) -> tuple[Parents, tuple[str, ...]]:
    """Return the tree of a cluster's switches over some or all of its ranks, as `aggregation_tree` takes it.

    Returns:
        The parents of ranks and switches, -1 at the top, and the names of the switches.

    Raises:
        ClusterError: no switch reduces, or a rank cannot reach one.
    """
    from hocket.cluster import aggregation_tree as aggregation_tree_of

    tree = aggregation_tree_of(cluster, ranks)
    world = len(tree.rank_parents)
    return np.concatenate([tree.rank_parents + world, np.where(tree.parents < 0, -1, tree.parents + world)]), tree.names


def _tree(
    collective: Collective, parents: ArrayLike | None, switches: Sequence[str] | None, arity: int, local: int
) -> tuple[Parents, tuple[str, ...]]:
    """Return the tree, checked; parts without ranks, and all above the lowest switch over all ranks, become -2."""
    world, rank = collective.world, np.arange(collective.world)
    leader = np.arange(0, world, local)
    leader[collective.root // local] = collective.root
    if parents is None:
        small, names = switch_tree(len(leader), arity)
        above = np.full(world + len(names), -1)
        inner = small >= 0
        above[np.concatenate([leader, np.arange(world, len(above))])[inner]] = small[inner] + world - len(leader)
    else:
        above = np.array(parents, np.int64)
        names = tuple(switches) if switches is not None else tuple(f"s{i}" for i in range(len(above) - world))
        _check(above, names, world)
    if local > 1:
        above[:world] = np.where(np.isin(rank, leader), above[:world], leader[rank // local])
    deep = _depths(above)
    below = np.zeros(len(above), np.int64)  # ranks below
    below[:world] = 1
    for level in range(int(deep.max()), 0, -1):
        at = np.flatnonzero(deep == level)
        np.add.at(below, above[at], below[at])
    above[below == 0] = -2
    whole = np.flatnonzero((below == world) & (np.arange(len(above)) >= world))
    above[whole] = -2
    above[whole[np.argmax(deep[whole])]] = -1
    return above, names


def _check(above: Parents, names: tuple[str, ...], world: int) -> None:
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


def _depths(above: Parents) -> Parents:
    """Return the links from each endpoint to the top."""
    deep, at = np.zeros(len(above), np.int64), above.copy()
    most = len(np.unique(above))  # a way up meets each inner endpoint once
    while (at >= 0).any():
        deep += at >= 0
        if deep.max() > most:
            raise ScheduleError(f"aggregation_tree: the parents of {int(deep.argmax())} go round in a circle")
        at = np.where(at >= 0, above[at], -1)
    return deep


def _rooted(above: Parents, root: int) -> Parents:
    """Return the tree re-rooted at rank `root`."""
    turned, here, before = above.copy(), root, -1
    while here >= 0:
        turned[here], before, here = before, here, int(above[here])
    return turned


def _form(
    collective: Collective,
    *,
    parents: ArrayLike | None,
    switches: Sequence[str] | None,
    arity: int,
    pieces: int,
    local: int,
) -> ClosedForm:
    p, root = collective.world, collective.root
    above, _ = _tree(collective, parents, switches, arity, local)
    far = _depths(above)[:p]  # of every rank from the top, or from the root
    hops = 2 * int(far.max())
    if collective.rooted:
        over_root = [root]
        while above[over_root[-1]] >= 0:
            over_root.append(int(above[over_root[-1]]))
        meet = np.arange(p)  # the lowest switch over a rank and the root
        for _ in range(int(far.max())):
            meet = np.where(np.isin(meet, over_root), meet, above[meet])
        links = {one: number for number, one in enumerate(reversed(over_root))}
        far = far + far[root] - 2 * np.array([links[one] for one in meet.tolist()])
        hops = int(far.max())
    if local == 1:
        passed = Fraction(hops + pieces - 1, pieces)
        return ClosedForm(hops + pieces - 1, Fraction(1), passed, Fraction(int(collective.kind == "reduce")))
    # Each leader has a step with all of its host. They coincide for leaders that are equally far, and in the first
    # step of all_reduce. A root has its switch and its host in one step.
    others, leads = local - 1, above[:p] >= p
    turns = len(np.unique(far[leads])) - int(collective.rooted)
    whole = turns + int(not collective.rooted)
    busy = hops + whole * (others - 1) + others * int(collective.rooted)
    reduced = {"broadcast": 0, "reduce": turns * others + local}.get(collective.kind, others)
    return ClosedForm(
        hops,
        Fraction(1 if collective.kind == "reduce" else local),
        Fraction(busy),
        Fraction(reduced),
        steps_inside=2 - int(collective.rooted),
        wire_inside=Fraction((turns + 1) * others),
        messages=busy,
        messages_inside=(turns + 1) * others,
    )


def _limit(collective: Collective, *, arity: int, pieces: int, local: int, **_: object) -> str | None:
    if arity < 2:
        return f"arity={arity}; give 2 or more"
    if local < 1 or collective.world % local or (local > 1 and collective.world == local):
        return f"local={local}: give the ranks a host, which must divide the world's size; a host alone needs no switch"
    if local > 1 and pieces > 1:
        return f"local={local}, pieces={pieces}: what leaders collect is not cut; give one of them"
    return None if pieces >= 1 else f"pieces={pieces}; give 1 or more"


@algorithm(
    title="Aggregation tree in switches",
    source="Graham et al., Scalable Hierarchical Aggregation Protocol (SHARP), COMHPC 2016",
    kinds=("all_reduce", "reduce", "broadcast", "barrier"),
    form=_form,
    limit=_limit,
    variants=({}, *({"pieces": pieces} for pieces in (4, 16, 64))),
    in_network=True,
)
def aggregation_tree(
    collective: Collective,
    *,
    parents: ArrayLike | None = None,
    switches: Sequence[str] | None = None,
    arity: int = 32,
    pieces: int = 1,
    local: int = 1,
) -> Schedule:
    """Build: up with reduction as children arrive, down with multicast from the lowest switch over all ranks.

    broadcast spreads from the root along the tree without going over the top, and reduce is its mirror image.

    Args:
        collective: An all_reduce, reduce, broadcast or barrier of any world.
        parents: `(world + switches,)`, the switch over each rank and switch, -1 at the top, as `cluster_tree` gives
            it; by default a tree that `switch_tree` makes.
        switches: Their names; by default s0, s1 ...
        arity: Children a switch of the default tree.
        pieces: Number of pieces that the vector is cut into; they follow each other through the levels (streaming).
        local: Ranks a host, those of a host one after the other; all but one give to that one, their leader, which is
            the root or else the first rank, and get the result from it. What `parents` says of the others is not used.

    Raises:
        ScheduleError: `parents` is no tree of switches over the ranks.
    """
    above, names = _tree(collective, parents, switches, arity, local)
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
    """Return the step in which each switch sends on: the one after the last of its children has sent."""
    deep = _depths(above)
    height = np.zeros(len(above), np.int64)
    for level in range(int(deep.max()), 0, -1):
        at = np.flatnonzero((deep == level) & (above >= 0))
        np.maximum.at(height, above[at], height[at] + 1)
    levels = [np.flatnonzero((height == step) & (above >= 0)) for step in range(int(height.max()))]
    return [Step.of(at, above[at], reduce=True) for at in levels]
