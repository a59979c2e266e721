"""Keeps the buffers of a model as data-parallel rank 0 has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._alike import Parcel
from ._batch_norm import synchronised_buffers
from ._world import World


class Buffers:
    """The buffers of some modules, but for those that are the same on all ranks by themselves.

    Args:
        modules: what this rank computes.
        world: the data-parallel ranks.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], world: World) -> None:
        self._modules = list(modules)
        self._world = world
        self._parcels: list[Parcel] = []
        self._alike = set().union(*(synchronised_buffers(m, world) for m in modules)) if modules else set()

    def send(self) -> None:
        """Gives all data-parallel ranks rank 0's; a collective operation."""
        if self._world.size == 1:
            return
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for buffer in (b for module in self._modules for b in module.buffers()):
            if buffer.numel() and id(buffer) not in self._alike:
                by_device.setdefault(buffer.device, []).append(buffer)
        for i, same_device in enumerate(by_device.values()):
            if i == len(self._parcels):
                self._parcels.append(Parcel(same_device, self._world))
            elif not self._parcels[i].holds(same_device):
                self._parcels[i] = Parcel(same_device, self._world)
            self._parcels[i].send()
