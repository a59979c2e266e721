"""The ranks as a mesh: stages of the pipeline, parts of the data, and sharers of tensors, each axis with its groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ._world import World


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place on each axis; rank = (p * data.size + d) * tensor.size + t.

    Attributes:
        whole: all ranks.
        pipeline: the ranks that hold the other stages of the same tensors for the same data.
        data: the ranks that hold the same for other data.
        tensor: the ranks that hold the other parts of the same tensors for the same data.
        batch_norm: the ranks of `data` that share the statistics of batch norm.
    """

    whole: World
    pipeline: World
    data: World
    tensor: World
    batch_norm: World

    @classmethod
    def make(cls, whole: World, *, pipeline: int, tensor: int, batch_norm: int = 1) -> Mesh:
        """Makes the groups; a collective operation over `whole`.

        Args:
            whole: all ranks.
            pipeline: the pipeline's degree.
            tensor: the tensor degree; the product of both divides the world.
            batch_norm: how many neighbours on the data axis share the statistics of batch norm.
        """
        data = whole.size // (pipeline * tensor)
        places = [divmod(rank, tensor) for rank in range(whole.size)]  # (p * data + d, t)
        axes = [
            [(pd % data, t) for pd, t in places],  # who share a pipeline
            [(pd // data, t) for pd, t in places],
            [(pd, 0) for pd, _ in places],
            [(pd // data, pd % data // batch_norm * tensor + t) for pd, t in places],
        ]
        return cls(whole, *(_world(whole, keys) for keys in axes))


def _world(whole: World, keys: list[tuple[int, int]]) -> World:
    """The group of the ranks that have this rank's key; every rank takes part in making every group."""
    if len(set(keys)) == 1:
        return whole
    mine = World(0, 1, None)
    for key in sorted(set(keys)):
        members = [rank for rank in range(whole.size) if keys[rank] == key]
        if len(members) == 1:
            continue
        group: Any = dist.new_group([dist.get_global_rank(whole.group, rank) for rank in members])
        if keys[whole.rank] == key:
            mine = World(members.index(whole.rank), len(members), group)
    return mine
