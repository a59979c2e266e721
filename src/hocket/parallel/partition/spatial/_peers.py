"""What the ranks that share samples do for each other while a divided model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from hocket.sharding import Interval, Shard

from ...batches import batch as _batch
from ...data import normalise
from ...mesh import World
from ..tensor import own_numbers
from . import _exchange


class SpatialGroups(NamedTuple):
    """The ranks that a divided model works with."""

    spatial: World  # the ranks that share each sample
    # the ranks that share batch norm's statistics of divided tensors: `spatial`, and perhaps other samples' ranks
    statistics: World
    samples: World  # the ranks that share those of replicated tensors, with the same place in `spatial`


class SpatialPeers:
    """The ranks of spatial parallelism, see `hocket.sharding.ShardPeers`."""

    exchanges = True
    gathers = True

    def __init__(self, groups: SpatialGroups, heard: Callable[[str, Any, str, str], None]) -> None:
        self.heard: Callable[[str, Any, str, str], None] | None = heard
        self.groups, self.rank, self.size = groups, groups.spatial.rank, groups.spatial.size

    def fetch(self, tensor: torch.Tensor, shard: Shard, wanted: Sequence[Interval], fill: float) -> torch.Tensor:
        """Return this rank's wanted rows of a divided tensor."""
        return _exchange.fetch(self.groups.spatial, tensor, shard, wanted, fill)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks."""
        return _exchange.total(self.groups.spatial, tensor)

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a replicated tensor as it is: gradients of such add up over the ranks in the end."""
        return tensor

    def own_random_numbers(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a block in which random numbers are this rank's own."""
        return own_numbers(self.groups.spatial, device)

    def batch_norm(
        self, input: torch.Tensor, divided: bool, weight: Any, bias: Any, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Return input normalised over the samples of all ranks that share statistics; None where none do."""
        world = self.groups.statistics if divided else self.groups.samples
        return None if world.size == 1 else normalise(input, weight, bias, eps, world, _batch.counts())
