"""The ranks as a mesh: a place on each axis of the planner's table, and the groups along them."""

import itertools
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hocket.planner import AXES, Plan, inner

from .world import World


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place on each axis, in whose order ranks are numbered, the last axis fastest; `mesh["data"]`."""

    whole: World  # all ranks
    axes: Mapping[str, World]  # by the name of an axis, the ranks along it that have this rank's place on all others
    batch_norm: World  # the ranks along the data axis that share the statistics of batch norm
    replicas: World  # the ranks that hold the same parameters
    shards: World  # of those the ranks among which parameters are sharded, if they are
    copies: World  # of those the ranks that hold the same shards then
    statistics: World  # the ranks of `batch_norm`, with all that hold parts of the same samples

    def __getitem__(self, name: str) -> World:
        return self.axes[name]

    @property
    def worlds(self) -> list[World]:
        """All groups of this rank, some of them more than once."""
        alike = [self.replicas, self.shards, self.copies]
        return [self.whole, *self.axes.values(), self.batch_norm, *alike, self.statistics]

    @classmethod
    def make(
        cls, whole: World, degrees: Mapping[str, int] | None = None, *, batch_norm: int = 1, shard: int = 0
    ) -> "Mesh":
        """Make the groups; a collective operation over `whole`.

        `degrees` are those of all axes but the data's that are not 1; their product divides the world. So many
        neighbours on the data axis as `batch_norm` says share its statistics, and parameters are sharded among so many
        as `shard` says; 0 for all.
        """
        sizes = {axis.name: (degrees or {}).get(axis.name, 1) for axis in inner()}
        known = 1
        for size in sizes.values():
            known *= size
        sizes["data"] = whole.size // known
        places = list(itertools.product(*(range(sizes[axis.name]) for axis in AXES)))

        def keys(dropped: Collection[str], among: int = 1, *, across: bool = False) -> list[tuple[int, ...]]:
            """Return of every rank its place on the axes that are not dropped: ranks with equal ones form a group.

            On the data axis it is that of so many neighbours, or of ranks `across` these that have the same place.
            """
            return [
                tuple(
                    (at % among if across else at // among) if axis.name == "data" else at
                    for axis, at in zip(AXES, place, strict=True)
                    if axis.name not in dropped
                )
                for place in places
            ]

        def group(
            name: str, dropped: Collection[str], among: int = 1, *, own: bool = False, across: bool = False
        ) -> World:
            return _world(whole, name, keys(dropped, among, across=across), own=own)

        axes = {axis.name: group(axis.name, [axis.name], own=axis.own_group and sizes[axis.name] > 1) for axis in AXES}
        norms = group("batch_norm", (), batch_norm)
        alike = [axis.name for axis in AXES if axis.replicates]
        dividing = [axis.name for axis in AXES if axis.divides == "samples"]
        # Where the other axes have one rank these are groups that there are.
        together = any(sizes[name] > 1 for name in alike if name != "data")
        replicas = group("replicas", alike) if together else axes["data"]
        statistics = group("statistics", dividing, batch_norm) if any(sizes[name] > 1 for name in dividing) else norms
        shards, copies = replicas, World(0, 1, None)
        if shard and shard < sizes["data"]:
            shards, copies = group("shards", (), shard), group("copies", (), shard, across=True)
        return cls(whole, axes, norms, replicas, shards, copies, statistics)

    @classmethod
    def of(cls, plan: Plan, whole: World) -> "Mesh":
        """Make the groups of a plan whose degrees are filled in; a collective operation over `whole`."""
        norm = (plan.batch_norm_group or plan.data_parallel_degree) if plan.sync_batch_norm else 1
        degrees = {axis.name: axis.degree(plan) for axis in inner()}
        return cls.make(whole, degrees, batch_norm=norm, shard=plan.shard_degree)


# Of every world the groups that were made of it: a group costs connections, and threads that wake up now and then, for
# as long as the process lives; the next mesh of the same shape uses those that there are.
_made: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], World]] = weakref.WeakKeyDictionary()


def _world(whole: World, axis: str, keys: list[tuple[int, ...]], *, own: bool = False) -> World:
    """Return the group of the ranks that have this rank's key; every rank takes part in making every group.

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
