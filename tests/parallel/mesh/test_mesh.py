"""Meshes of one shape share their groups; axes, and meshes of another shape, have their own."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from hocket.parallel.mesh._mesh import Mesh
from hocket.parallel.mesh.world import current, join
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


def _timeouts() -> list[Any]:
    found = [join(timeout_s=9).group.timeout.total_seconds()]
    try:
        join(timeout_s=-1)
    except ValueError as error:
        found.append(str(error))
    for setting, given in (("", None), ("500", None), ("", 3.0)):
        dist.destroy_process_group()
        os.environ["HOCKET_TIMEOUT"] = setting
        found.append(join(timeout_s=given).group.timeout.total_seconds())
    return found


def test_worlds_have_a_time_out() -> None:
    for first, text, *joined in run_ranks(_timeouts, 2):
        assert first == 9
        assert text == "timeout_s=-1: give the seconds that an operation may take, a number above 0"
        assert joined == [300, 500, 3]


SIZES = (0, 1, 200, 230, 231, 232, 233, 240, 248, 249, 256, 300, 100_000)  # bytes on either side of one collective's


def _told() -> list[bool]:
    world = current()
    found = []
    for a in SIZES:
        for b in SIZES[::3]:
            values = [b"a" * a, "b" * b]
            found.append(world.from_all(values[world.rank]) == values)
    return [*found, world.from_all(None) == [None, None]]


def test_values_of_any_size_reach_all_ranks() -> None:
    assert run_ranks(_told, 2) == [[True] * (len(SIZES) * len(SIZES[::3]) + 1)] * 2
