"""One rank's shard of a model, run without the others: what dividing samples costs, for the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...mesh import DryGroup, World
from ._parallelize import SpatialParallel, become_divided
from ._peers import SpatialGroups


@contextmanager
def dry_run(model: nn.Module, ranks: int, heard: Callable[[str, int], None]) -> Iterator[None]:
    """Have a model work on the shards of one of `ranks` ranks while the block runs; see `hocket.workload.capture`.

    It is a rank that no other one has more to do than: the first of two, whose shard is as large as any, or the second
    of more, which has neighbours on both sides.

    Args:
        model: The user's; afterwards as it was.
        ranks: Among how many each sample is divided.
        heard: Hears of each exchange: its kind, and bytes of its full tensor.
    """
    world = World(0 if ranks < 3 else 1, ranks, DryGroup(heard))
    form = SpatialParallel(model, SpatialGroups(world, world, World(0, 1, None)))
    own: Any = type(model)
    become_divided(model, form)
    try:
        with form.running():
            yield
    finally:
        model.__class__ = own
        del model.spatial
