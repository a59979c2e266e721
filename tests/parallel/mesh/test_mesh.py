"""Meshes of one shape share their groups; axes, and meshes of another shape, have their own."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hocket.parallel.mesh._mesh import Mesh
from hocket.parallel.mesh.world import current
from hocket.testing import run_ranks


def _meshes() -> dict[str, bool]:
    world = current()
    one, again = (Mesh.make(world, {"pipeline": 2}) for _ in range(2))
    other = Mesh.make(world, {"tensor": 2})
    sums = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(sums, group=again["pipeline"].group)
    return {
        "the same": one == again,
        "axes": one["pipeline"].group is not one["data"].group,
        "shapes": other["tensor"].group is not one["data"].group and other["data"].group is not one["pipeline"].group,
        "works": sums.item() == [2.0, 4.0, 2.0, 4.0][dist.get_rank()],
    }


def test_groups_are_made_once_for_each_shape_and_axis() -> None:
    for found in run_ranks(_meshes, 4, timeout_s=60):
        assert all(found.values()), found
