"""Double binary tree: two trees, each for half of the data, in which (almost) nobody has inner work twice."""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from hocket.schedule import Collective, Schedule, Step

from ._algorithm import ClosedForm, algorithm
from ._steps import piece_limit, pipelined, rounds


def _form(collective: Collective, *, pieces: int) -> ClosedForm:
    """`wire`, `reduced` and `messages` are bounds from above, equal for one piece and an even world."""
    p, depth = collective.world, rounds(collective.world)
    steps = 2 * depth + pieces - 1
    if p == 2:
        return ClosedForm(steps, Fraction(1), Fraction(1), Fraction(1, 2))
    if p == 3:  # two chains with their middles and leaves at different ranks
        wire = min(Fraction(2), Fraction(3 * (pieces + 1), 2 * pieces))
        return ClosedForm(steps, Fraction(3, 2), wire, Fraction(1), messages=2 * (pieces + 1))
    # Inner ranks send a half up, two down, and one as a leaf of the other tree: 2 S while the pipeline is full.
    # Each of 2 depth - 3 further steps, in which it fills or drains, passes two pieces of a half, to or from children.
    drain = Fraction(2 * depth - 3, pieces)
    messages = 4 * pieces + 2 * (2 * depth - 3)
    return ClosedForm(steps, Fraction(2), 2 + drain, 1 + drain / 2, messages=messages)


def double_tree_parents(world: int) -> NDArray[np.int64]:
    """Return the parents of every rank in both trees, -1 at the root.

    In the first, the parent of r with lowest set bit b is r with b cleared and 2b set, or r with b cleared if there is
    no such rank. The second is its mirror image for an even world, and the first shifted by one rank for an odd one.

    Returns:
        `(2, world)`; both trees have depth ceil(log2 world).
    """
    rank = np.arange(world)
    bit = rank & -rank
    parent = (rank ^ bit) | (bit << 1)
    parent = np.where(parent < world, parent, rank ^ bit)
    parent[0] = -1
    if world % 2 == 0:
        other = np.where(parent[::-1] < 0, -1, world - 1 - parent[::-1])
    else:
        other = np.where(np.roll(parent, 1) < 0, -1, (np.roll(parent, 1) + 1) % world)
    return np.stack([parent, other])


def _depths(parent: NDArray[np.int64]) -> NDArray[np.int64]:
    depth, above = np.zeros(len(parent), np.int64), parent.copy()
    while (above >= 0).any():
        depth += above >= 0
        above = np.where(above >= 0, parent[above], -1)
    return depth


@algorithm(
    title="Double binary tree",
    source="Sanders, Speck and Traff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009; the "
    "trees are those of NCCL (src/graph/trees.cc)",
    kinds=("all_reduce",),
    form=_form,
    limit=piece_limit,
    variants=({}, *({"pieces": pieces} for pieces in (4, 16, 64))),
)
def double_tree(collective: Collective, *, pieces: int = 1) -> Schedule:
    """Build the two trees: up with reduction, then down with copies.

    Args:
        collective: An all_reduce of any world.
        pieces: Number of pieces that the half of each tree is cut into; they follow each other through the levels.
    """
    p, deepest = collective.world, rounds(collective.world)
    parents = double_tree_parents(p)
    tree, child = np.nonzero(parents >= 0)
    parent = parents[tree, child]
    depth = np.stack([_depths(one) for one in parents])[tree, child]
    up = [(depth == level, True) for level in range(deepest, 0, -1)]
    down = [(depth == level, False) for level in range(1, deepest + 1)]
    stages = [
        Step.of(child[at], parent[at], tree[at], reduce=True)
        if reduce
        else Step.of(parent[at], child[at], tree[at], reduce=False)
        for at, reduce in [*up, *down]
    ]
    return Schedule("double_tree", collective, 2 * pieces, tuple(pipelined(stages, pieces)))
