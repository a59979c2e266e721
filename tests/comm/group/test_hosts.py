"""Ranks on several hosts (told apart by HOCKET_HOST): two levels, schedules between hosts, the same results."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from hocket import comm
from hocket.profile import Recorder
from hocket.schedule import ScheduleError

from ..host_world import run
from .test_random_operations import _programs

LAYOUTS = {
    "two hosts of two": [0, 0, 1, 1],
    "two hosts, ranks in turn": [0, 1, 0, 1],
    "three hosts of one": [0, 1, 2],
    "uneven": [0, 0, 1],
    "two hosts of three": [0, 0, 0, 1, 1, 1],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_random_programs_agree_with_numpy_on_any_layout(layout, seed):
    assert min(run(layout, _programs, seed, 6)) > 10


def _paths():
    found = {}
    for name, action in {
        "small": lambda: dist.all_reduce(torch.ones(10)),
        "large": lambda: dist.all_reduce(torch.ones(500_001)),
        "broadcast": lambda: dist.broadcast(torch.ones(10), 1),
        "barrier": dist.barrier,
    }.items():
        with Recorder() as recorder:
            action()
        (found[name],) = recorder.paths()
    return found


def test_ranks_of_one_host_use_shared_memory_and_hosts_use_schedules():
    for paths in run([0, 0, 1, 1], _paths):
        assert all(path.startswith("shm + ") for path in paths.values()), paths
        assert paths["large"] != "shm + leaders"
    for paths in run([0, 1, 2], _paths):
        assert all(path.startswith("gloo ") for path in paths.values()), paths
    for paths in run([0, 0, 0], _paths):
        assert "gloo" not in str(paths)


def _chosen():
    comm.choose("all_reduce <64KiB one_shot; all_reduce >=64KiB ring rings=2")
    with Recorder() as recorder:
        dist.all_reduce(torch.ones(16))
        data = torch.ones(1_000_003)
        dist.all_reduce(data)
        assert (data == 3).all()
    return recorder.paths()


def test_one_line_overrides_the_table():
    assert run([0, 1, 2], _chosen) == [{"gloo one_shot": 1, "gloo ring": 1}] * 3


def _path_of_one():
    with Recorder() as recorder:
        dist.all_reduce(torch.ones(16))
    return recorder.paths()


def test_the_environment_overrides_it_too(tmp_path):
    layout = [0, 1, 2]
    setting = {"HOCKET_CHOICES": "all_reduce * double_tree pieces=2"}
    assert run(layout, _path_of_one, env=setting) == [{"gloo double_tree": 1}] * 3


def test_a_table_that_is_not_understood_is_refused_at_once():
    with pytest.raises(ScheduleError, match="all_reduce >=64KiB rong"):
        comm.choose("all_reduce >=64KiB rong")
    with pytest.raises(ScheduleError, match=r"absent\.toml' cannot be read"):
        comm.choose("absent.toml")


def _same_bits():
    results = []
    for numel in (7, 5000, 300_001):
        torch.manual_seed(dist.get_rank())
        data = torch.randn(numel)
        exact = data.double()
        dist.all_reduce(data)
        dist.all_reduce(exact)
        assert torch.allclose(data.double(), exact, rtol=1e-5, atol=1e-6)
        results.append(data)
        average = torch.full((numel,), float(dist.get_rank()))
        dist.all_reduce(average, ReduceOp.AVG)
        assert torch.equal(average, torch.full((numel,), (dist.get_world_size() - 1) / 2))
    return results


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_all_ranks_have_the_same_bits(layout):
    first, *others = run(layout, _same_bits)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
