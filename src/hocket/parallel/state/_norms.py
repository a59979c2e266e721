"""Norms over whole parameters, for optimizers that need them, whatever parts of the parameters ranks hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from ..mesh import World
from ._owned import Owned


class WholeNorms:
    """See `hocket.parallel.state.optim.Totals`.

    Args:
        groups: the number of its parameter group, for each parameter that the optimizer updates on any rank.
        copies: what this rank updates, and how many ranks of the world hold the same.
        world: the ranks that hold parts of the model.
        local: whether every rank holds all of it, so that nobody need be asked.
    """

    def __init__(
        self, groups: Mapping[str, int], copies: Iterable[tuple[Owned, int]], world: World, *, local: bool
    ) -> None:
        self.names = tuple(groups)
        self.groups = tuple(groups.values())
        numbers = {name: number for number, name in enumerate(groups)}
        self.places: dict[torch.Tensor, tuple[int, float]] = {
            item.leaf: (numbers[item.name], 1.0 if local else 1.0 / count)
            for item, count in copies
            if item.name in numbers
        }
        self._world = world
        self._local = local

    def add_up(self, squares: torch.Tensor) -> torch.Tensor:
        """The sums over ranks; a collective operation unless every rank holds everything."""
        if self._local or self._world.size == 1:
            return squares
        total = squares.to(self._world.device)
        dist.all_reduce(total, group=self._world.group)
        return total.cpu()
