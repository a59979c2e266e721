"""The ranks as a mesh: stages of the pipeline, parts of the data, sharers of tensors or samples, and their groups."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .world import World


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place on each axis; rank = ((p * data.size + d) * tensor.size + t) * spatial.size + s.

    Attributes:
        whole: all ranks.
        pipeline: the ranks that hold the other stages of the same tensors for the same data.
        data: the ranks that hold the same for other data.
        tensor: the ranks that hold the other parts of the same tensors for the same data.
        batch_norm: the ranks of `data` that share the statistics of batch norm.
        spatial: the ranks that hold the other slabs of the same samples.
        replicas: the ranks that hold the same parameters: those of `data` and of `spatial` together.
        statistics: the ranks of `batch_norm` and of `spatial` together.
    """

    whole: World
    pipeline: World
    data: World
    tensor: World
    batch_norm: World
    spatial: World
    replicas: World
    statistics: World

    @classmethod
    def make(cls, whole: World, *, pipeline: int, tensor: int, batch_norm: int = 1, spatial: int = 1) -> Mesh:
        """Makes the groups; a collective operation over `whole`.

        Args:
            whole: all ranks.
            pipeline: the pipeline's degree.
            tensor: the tensor degree.
            batch_norm: how many neighbours on the data axis share the statistics of batch norm.
            spatial: the spatial degree; the product of the degrees divides the world.
        """
        data = whole.size // (pipeline * tensor * spatial)
        places = []
        for rank in range(whole.size):
            others, s = divmod(rank, spatial)
            others, t = divmod(others, tensor)
            places.append((*divmod(others, data), t, s))
        axes: list[list[tuple[int, ...]]] = [
            [(d, t, s) for _, d, t, s in places],  # who share a pipeline
            [(p, t, s) for p, _, t, s in places],
            [(p, d, s) for p, d, _, s in places],
            [(p, d // batch_norm, t, s) for p, d, t, s in places],
            [(p, d, t) for p, d, t, _ in places],
            [(p, t) for p, _, t, _ in places],
            [(p, d // batch_norm, t) for p, d, t, _ in places],
        ]
        if spatial == 1:  # these are others, and need no groups of their own
            pipes, data_axis, tensors, norms = (_world(whole, axis, keys) for axis, keys in enumerate(axes[:4]))
            return cls(whole, pipes, data_axis, tensors, norms, World(0, 1, None), data_axis, norms)
        # Halos must not wait for the reductions of gradients that go on beside them: slabs have a group of their own.
        apart = [_world(whole, axis, keys, own=axis == 4) for axis, keys in enumerate(axes)]
        return cls(whole, *apart)


# Of every world the groups that were made of it: a group costs connections, and threads that wake up now and then, for
# as long as the process lives; the next mesh of the same shape uses those that there are.
_made: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], World]] = weakref.WeakKeyDictionary()


def _world(whole: World, axis: int, keys: list[tuple[int, ...]], *, own: bool = False) -> World:
    """The group of the ranks that have this rank's key; every rank takes part in making every group.

    All ranks need none, unless it shall be their `own`. Axes share none, lest operations of one wait for another's.
    """
    if len(set(keys)) == 1 and not own:
        return whole
    if whole.group is None:
        return World(0, 1, None)
    known = _made.setdefault(whole.group, {})
    name = (axis, *keys)
    if name not in known:
        known[name] = World(0, 1, None)
        for key in sorted(set(keys)):
            members = [rank for rank in range(whole.size) if keys[rank] == key]
            if len(members) == 1:
                continue
            group: Any = dist.new_group([dist.get_global_rank(whole.group, rank) for rank in members])
            if keys[whole.rank] == key:
                known[name] = World(members.index(whole.rank), len(members), group)
    return known[name]
