"""torch >= 2.14: hooks, the flight recorder and split groups, with the handles of a group that nobody listens to."""

import json
import os

import pytest
import torch
import torch.distributed as dist

from hocket.comm import CollectiveMismatchError, torch_adapter
from hocket.testing import run_ranks

_SINCE_2_15 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
pytestmark = pytest.mark.skipif(not torch_adapter.HAS_HOOKS, reason="torch < 2.14; `make test-newest-torch` runs it")


def _every_operation(n, rank, group=None):
    """Post each operation once and return what came out, as lists."""
    found = []
    one, wide = torch.full((2,), float(rank)), torch.arange(2.0 * n) + 10 * rank
    for operator in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        dist.all_reduce(value := one.clone(), operator, group)
        found.append(value.tolist())
    for operation in (dist.broadcast, dist.reduce):
        operation(value := one.clone(), 1, group=group)
        found.append(value.tolist())
    parts = [torch.zeros(2) for _ in range(n)]
    dist.all_gather(parts, one, group)
    dist.all_gather_into_tensor(whole := torch.zeros(2 * n), one, group)
    dist.reduce_scatter_tensor(share := torch.zeros(2), wide, group=group)
    dist.reduce_scatter(listed := torch.zeros(2), list(wide.split(2)), group=group)
    dist.all_to_all_single(turned := torch.zeros(2 * n), wide, group=group)
    dist.all_to_all(turned_parts := [torch.zeros(2) for _ in range(n)], list(wide.split(2)), group)
    dist.scatter(given := torch.zeros(2), list(wide.split(2)) if rank == 0 else None, 0, group)
    dist.gather(one, taken := [torch.zeros(2) for _ in range(n)] if rank == 1 else None, 1, group)
    dist.barrier(group)
    if rank == 0:
        assert dist.recv(value, group=group) == 1, "a receive from any rank says from which"
        dist.send(value, 1, group)
    elif rank == 1:
        dist.send(value, 0, group)
        dist.recv(value, 0, group)
    found += [t.tolist() for t in (*parts, whole, share, listed, turned, *turned_parts, given, *(taken or ()), value)]
    return found


def _hooks():
    n, rank, world = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    plain = _every_operation(n, rank)
    before, after = [], []
    world.register_pre_hook(7, lambda given: before.append((given.name.name, given.op_id)))
    world.register_post_hook(8, lambda given: after.append((given.name.name, given.op_id)))
    assert _every_operation(n, rank) == plain
    assert before == after
    names = {name for name, _ in before}
    for turned in (torch.zeros(2 * n), torch.zeros(2 * n)):
        work = dist.all_to_all_single(turned, torch.ones(2 * n), async_op=True)
        work.wait()
        assert work.is_completed()
        assert turned.tolist() == [1.0] * 2 * n
    with dist._coalescing_manager(async_ops=True) as both:
        dist.all_reduce(one := torch.ones(2))
        dist.all_reduce(two := torch.full((3,), 2.0))
    both.wait()
    assert (one[0], two[0]) == (n, 2 * n)
    work = dist.all_reduce(value := torch.ones(3), async_op=True)
    work.wait()
    assert work.is_completed(), "the handle is the group's, not torch's wrapper"
    assert work.result()[0] is value
    with pytest.raises(ValueError, match="9 is no rank of this group"):
        dist.broadcast(value, 9)
    with pytest.raises(CollectiveMismatchError, match="disagree"):
        dist.all_reduce(torch.ones(3 + rank))
    dist.all_reduce(value)
    assert value.tolist() == [n * n] * 3, "the group goes on"
    world.unregister_pre_hook(7)
    world.unregister_post_hook(8)
    count = len(before)
    dist.all_reduce(value)
    assert len(before) == count
    return names


def test_hooks_see_every_operation_and_change_nothing():
    names, *_ = run_ranks(_hooks, 3)
    known = {
        "ALLREDUCE", "BROADCAST", "REDUCE", "ALLGATHER", "ALLGATHER_BASE", "REDUCE_SCATTER", "REDUCE_SCATTER_BASE",
        "ALLTOALL_BASE", "ALLTOALL", "SCATTER", "GATHER", "BARRIER", "SEND", "RECV",
    }  # fmt: skip
    # torch 2.14 has one name for both forms, on every backend.
    assert names >= (known if _SINCE_2_15 else {name for name in known if not name.endswith("_BASE")})


def _split():
    rank = dist.get_rank()
    half = dist.split_group(None, [[0, 2], [1, 3]], group_desc="halves")
    assert (half.size(), half.rank(), half.group_desc) == (2, rank // 2, "halves")
    work = dist.all_reduce(value := torch.full((2,), float(rank)), group=half, async_op=True)
    work.wait()
    assert work.is_completed()
    dist.monitored_barrier()
    dist.destroy_process_group(half)
    none = dist.split_group(None, [[0, 1]])
    assert (none is dist.GroupMember.NON_GROUP_MEMBER) == (rank > 1)
    dist.barrier()
    return value[0].item()


@pytest.mark.skipif(not _SINCE_2_15, reason="torch 2.14 splits groups on accelerators only")
def test_a_group_is_split():
    assert run_ranks(_split, 4) == [2.0, 4.0, 2.0, 4.0]


def _recorded():
    os.environ["TORCH_FR_BUFFER_SIZE"] = "50"
    dist.init_process_group("hocket")
    _every_operation(dist.get_world_size(), dist.get_rank())
    dist.all_reduce(torch.ones(7))
    from torch._C._distributed_c10d import _dump_fr_trace_json

    entries = json.loads(_dump_fr_trace_json(backend="hocket"))["entries"]
    dist.destroy_process_group()
    return [(entry["profiling_name"], entry["input_sizes"]) for entry in entries]


@pytest.mark.skipif(not _SINCE_2_15, reason="torch 2.14 gives no backend's records by its name")
def test_the_flight_recorder_records_where_it_is_asked_for():
    first, second = run_ranks(_recorded, 2, backend=None)
    assert ("hocket:all_reduce", [[7]]) in first
    assert ("hocket:all_reduce", [[7]]) in second


def _answers():
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return [name for name in dir(backend) if "supports_" in name and getattr(backend, name) is True]


def test_a_backend_answers_what_it_supports():
    assert run_ranks(_answers, 1) == [["supports_splitting"]]
