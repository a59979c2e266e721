"""Where the ranks of a group sit at its aggregators: one for all, or leaves of a tree with several ranks each."""

from collections.abc import Sequence
from dataclasses import dataclass

from hocket.aggregator import Level


@dataclass(frozen=True, slots=True)
class TreePosition:
    """One rank's place."""

    order: tuple[int, ...]  # rank at each position; those below one aggregator follow each other
    position: int  # position of this rank
    levels: tuple[Level, ...]  # levels from this rank up to the root

    @property
    def positions(self) -> tuple[int, ...]:
        """The position of each rank."""
        found = [0] * len(self.order)
        for position, rank in enumerate(self.order):
            found[rank] = position
        return tuple(found)


def tree_position(addresses: Sequence[str], rank: int) -> TreePosition:
    """Return the position of a rank, if rank r is to connect to `addresses[r]`.

    One address for all is one aggregator. Several are leaves, in the order of their first ranks, and the parent of them
    all is the root.
    """
    leaves: dict[str, list[int]] = {}
    for r, address in enumerate(addresses):
        leaves.setdefault(address, []).append(r)
    order = tuple(r for ranks in leaves.values() for r in ranks)
    position = order.index(rank)
    number = list(leaves).index(addresses[rank])
    here = leaves[addresses[rank]]
    first = order.index(here[0])
    own = Level(len(here), here.index(rank), position, 1)
    if len(leaves) == 1:
        return TreePosition(order, position, (own,))
    return TreePosition(order, position, (own, Level(len(leaves), number, first, len(here))))
