"""Keeps the buffers of a model as data-parallel rank 0 has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..mesh import World
from ..state import FlatBundles
from ._batch_norm import synchronised_buffers


class Buffers:
    """The buffers of some modules, but for those that are the same on all ranks by themselves.

    Args:
        modules: what this rank computes.
        world: the data-parallel ranks.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], world: World) -> None:
        self._modules = list(modules)
        self._world = world
        self._bundles = FlatBundles(world)
        self._alike = set().union(*(synchronised_buffers(m, world) for m in modules)) if modules else set()

    def send(self) -> None:
        """Gives all data-parallel ranks rank 0's; a collective operation."""
        if self._world.size == 1:
            return
        self._bundles.broadcast(b for module in self._modules for b in module.buffers() if id(b) not in self._alike)
