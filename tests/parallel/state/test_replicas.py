"""Replicas that would average gradients of different parameters are an error on every rank."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from hocket.parallel.mesh import Mesh
from hocket.parallel.mesh.world import current
from hocket.parallel.state import check_replicas
from hocket.testing import run_ranks


def in_another_order(rank_of_another: int) -> str:
    world = current()
    mesh = Mesh.make(world, {"pipeline": 2})
    layers = [("a", nn.Linear(4, 4)), ("b", nn.Linear(4, 4))]
    module = nn.Sequential(OrderedDict(reversed(layers) if world.rank == rank_of_another else layers))
    names = {name: f"model.{name}" for name, _ in module.named_parameters()}
    try:
        check_replicas([(module, names)], mesh.replicas, world)
    except RuntimeError as error:
        return str(error)
    return "fine"


def test_another_order_of_one_replica_ends_all_ranks() -> None:
    """Sums over different parameters of one shape are wrong without a word, so the orders are compared at build."""
    said = run_ranks(in_another_order, 4, 3)
    assert all("in different orders" in one for one in said)
    assert any("'model.b.weight' where the first one holds 'model.a.weight'" in one for one in said)
    assert run_ranks(in_another_order, 4, -1) == ["fine"] * 4
