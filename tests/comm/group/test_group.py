"""The process group as torch's users meet it: futures, many groups, many operations, big tensors, workers that fork."""

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.utils._python_dispatch import TorchDispatchMode

from hocket import comm
from hocket.comm import torch_adapter as c10d
from hocket.comm.group import _work
from hocket.testing import deadline, run_ranks

from ..host_world import run


def _futures_and_works():
    n = dist.get_world_size()
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert doubled.wait()[0].item() == 2 * n
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor
    late = dist.all_reduce(torch.ones(3), async_op=True)
    late.wait()
    assert late.get_future().wait()[0].tolist() == [n] * 3
    works = [dist.all_reduce(torch.full((10,), float(i)), async_op=True) for i in range(1000)]
    works[-1].wait()
    assert all(w.is_completed() for w in works), "operations of one group complete in order"
    return [w.result()[0][0].item() for w in works] == [float(i * n) for i in range(1000)]


def test_futures_and_a_thousand_outstanding_operations():
    assert run_ranks(_futures_and_works, 2) == [True, True]


def test_whoever_has_waited_finds_the_future_complete(monkeypatch):
    class Late(_work.OperationFuture):
        def set_result(self, result):
            time.sleep(0.05)  # as when the thread that ends the operation loses its processor here
            super().set_result(result)

    monkeypatch.setattr(_work, "OperationFuture", Late)
    for error in None, ValueError("no"):
        work = _work.HocketWork([torch.ones(1)], None)
        future = work.get_future()
        thread = threading.Thread(target=work.finish, args=(error,))
        thread.start()
        with contextlib.suppress(ValueError):
            work.wait()
        assert future.done()
        assert work.is_completed()
        assert work.is_success() == (error is None)
        thread.join()


def _many_groups():
    n = dist.get_world_size()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        group = dist.new_group(list(range(n)))
        tensor = torch.ones(5)
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        assert tensor[0] == n
        dist.destroy_process_group(group)
        del group
    gc.collect()
    names = [t.name for t in threading.enumerate() if t.name.startswith("hocket-")]
    return len(os.listdir("/proc/self/fd")) - before, names


def test_fifty_groups_come_and_go_without_a_trace():
    for descriptors, threads in run_ranks(_many_groups, 3):
        assert descriptors < 60, "gloo's own sockets may linger, one group's at the most"
        assert threads == []


def _groups_of_one_name():
    sums = []
    for _ in range(3):
        if dist.get_rank() != 1:
            group = dist.new_group([2, 0], use_local_synchronization=True)
            tensor = torch.ones(3)
            dist.all_reduce(tensor, group=group)
            sums.append(tensor[0].item())
            dist.destroy_process_group(group)
    return sums


def test_a_group_may_have_the_name_of_one_that_was_destroyed():
    assert run_ranks(_groups_of_one_name, 3) == [[2.0] * 3, [], [2.0] * 3]


def _two_lives():
    for _ in range(3):
        dist.init_process_group("hocket")
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor[0] == dist.get_world_size()
        dist.destroy_process_group()
    return True


def test_init_and_destroy_in_one_process():
    assert run_ranks(_two_lives, 2, backend=None) == [True, True]


class _Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((100,), float(index * index))


def _workers_fork_while_operations_run():
    loader = torch.utils.data.DataLoader(
        _Squares(), batch_size=8, num_workers=2, multiprocessing_context="fork", persistent_workers=False
    )
    total = comm.zeros(100)
    for _ in range(2):
        for batch in loader:
            work = dist.all_reduce(batch.sum(0), async_op=True)
            work.wait()
            total += work.result()[0]
    dist.barrier()
    return total[0].item()


def test_forked_data_workers_do_not_disturb_the_group():
    expected = 2 * 2 * sum(float(i * i) for i in range(64))
    assert run_ranks(_workers_fork_while_operations_run, 2) == [expected] * 2


def _a_forked_child_communicates():
    """What a child of rank 0 hears, alone with its calls; the parents go on."""
    me = dist.get_rank()
    dist.all_reduce(torch.ones(3))
    (dist.send if me == 0 else dist.recv)(torch.ones(3), 1 - me)
    heard = ""
    if me == 0:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            for call in (lambda: dist.all_reduce(torch.full((3,), 7.0)), lambda: dist.send(torch.full((3,), 7.0), 1)):
                try:
                    call()
                    os.write(writer, b"accepted\n")
                except comm.CommError as error:
                    os.write(writer, f"{error}\n".encode())
            dist.destroy_process_group()
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            heard = file.read()
        os.waitpid(child, 0)
    dist.all_reduce(total := torch.ones(3))
    message = torch.full((3,), 5.0)
    (dist.send if me == 0 else dist.recv)(message, 1 - me)
    return heard.splitlines(), total.tolist(), message.tolist()


def test_a_forked_child_does_not_speak_for_its_rank():
    (heard, *mine), (_, *theirs) = run_ranks(_a_forked_child_communicates, 2)
    assert len(heard) == 2
    assert all("belongs to the process that this one was forked from" in line for line in heard)
    assert mine == theirs == [[2.0] * 3, [5.0] * 3]


def _input_among_outputs(numel):
    """Whether operations are right whose input lies where another rank's part is to be written."""
    me, n = dist.get_rank(), dist.get_world_size()

    def mine(length):
        return torch.arange(float(length)) * (me + 1)

    def part(r, length, begin=0):
        return torch.arange(float(begin), float(begin + length)) * (r + 1)

    found = {}
    row = [torch.zeros(numel) for _ in range(n)]
    row[1 - me].copy_(mine(numel))
    dist.all_gather(row, row[1 - me])
    found["all_gather"] = all(torch.equal(row[r], part(r, numel)) for r in range(n))
    whole = torch.zeros(n * numel)
    place = whole.view(n, numel)[1 - me]
    place.copy_(mine(numel))
    dist.all_gather_single(whole, place)
    found["all_gather_single"] = torch.equal(whole, torch.cat([part(r, numel) for r in range(n)]))
    row = [torch.zeros(numel) for _ in range(n)]
    row[1].copy_(mine(numel))
    dist.gather(row[1], row if me == 0 else None, 0)
    found["gather"] = me != 0 or all(torch.equal(row[r], part(r, numel)) for r in range(n))
    row = [part(0, numel) * (r + 1) for r in range(n)]
    target = row[1]
    dist.scatter(target, row if me == 0 else None, 0)
    found["scatter"] = torch.equal(target, part(0, numel) * (me + 1))
    for registered in (False, True):
        whole = comm.empty(n * numel) if registered else torch.empty(n * numel)
        whole.copy_(mine(n * numel))
        target = whole.view(n, numel)[1 - me]
        dist.reduce_scatter_single(target, whole)
        found[f"reduce_scatter, registered {registered}"] = torch.equal(target, part(2, numel, me * numel))
    buffer = torch.zeros(n * numel + 5)
    buffer[: n * numel].copy_(mine(n * numel))
    dist.all_to_all_single(buffer[5:], buffer[: n * numel])
    found["all_to_all"] = torch.equal(buffer[5:], torch.cat([part(r, numel, me * numel) for r in range(n)]))
    return [kind for kind, right in found.items() if not right]


@pytest.mark.parametrize("numel", [10, 400_000])
def test_an_input_may_lie_where_another_part_is_written(numel):
    assert run_ranks(_input_among_outputs, 2, numel, timeout_s=60) == [[]] * 2


def _big():
    me, n = dist.get_rank(), dist.get_world_size()
    numel = int(2.2 * 2**30)
    tensor = torch.full((numel,), me + 1, dtype=torch.uint8)
    dist.all_reduce(tensor)
    assert tensor[0] == tensor[-1] == tensor[numel // 2] == n * (n + 1) // 2
    assert int(tensor.max()) == int(tensor.min())
    tensor.fill_(me)
    dist.broadcast(tensor, 1)
    return int(tensor.min()), int(tensor.max())


@pytest.mark.long
def test_a_tensor_of_more_than_two_gibibytes():
    assert run_ranks(_big, 2, timeout_s=110, group_timeout_s=100) == [(1, 1), (1, 1)]


def _order_of_groups():
    """Ranks may use two groups in different orders; each group goes at its own pace."""
    me = dist.get_rank()
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    a, b = torch.ones(4), torch.ones(4)
    pair = [(first, a), (second, b)] if me == 0 else [(second, b), (first, a)]
    for work in [dist.all_reduce(t, group=g, async_op=True) for g, t in pair]:
        work.wait()
    return a[0].item(), b[0].item()


def test_groups_do_not_wait_for_each_other():
    assert run_ranks(_order_of_groups, 2, timeout_s=20) == [(2.0, 2.0)] * 2


class _Listener:
    def __init__(self):
        self.finished, self.waited = [], []

    def operation_finished(self, op):
        self.finished.append(op)

    def operation_waited(self, op, begin_s, end_s):
        self.waited.append((op, begin_s, end_s))


def _observed():
    listener = _Listener()
    end = comm.observe(listener)
    with comm.label("weights"):
        dist.all_reduce(torch.ones(1000))
    dist.all_reduce(comm.zeros(200_000), async_op=True).wait()
    dist.all_gather_into_tensor(torch.zeros(20), torch.zeros(10))
    end()
    dist.barrier()
    sync, asynchronous, gathered = listener.finished
    assert (sync.kind, sync.nbytes, sync.dtype, sync.world, sync.seq) == ("all_reduce", 4000, "float32", 2, 1)
    assert (sync.path, sync.label, sync.asynchronous) == ("shm-staged", "weights", False)
    assert sync.posted_s <= sync.started_s <= sync.arrived_s <= sync.finished_s
    assert (asynchronous.path, asynchronous.label, asynchronous.asynchronous) == ("shm-direct", None, True)
    assert (gathered.kind, gathered.nbytes) == ("all_gather", 80)
    assert (sync.inline, asynchronous.inline, gathered.inline) == (True, False, True)
    assert {op.seq for op, *_ in listener.waited} <= {asynchronous.seq}, (
        "it may have been over before it was waited for"
    )
    return True


def test_observers_hear_of_every_operation():
    assert run_ranks(_observed, 2) == [True, True]


def _bad_arguments():
    cases = [
        (lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND), "bitwise|BAND"),
        (lambda: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(5)), "cannot be cut into 2 outputs of 3"),
        (lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(5)), "cannot hold 2 inputs of 5"),
        (lambda: dist.all_to_all_single(torch.ones(3), torch.ones(4)), "divided among 2 ranks"),
        (lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 1], [2, 2]), "add up to the first axis"),
        (lambda: dist.all_reduce(torch.ones(3, device="meta")), "no transport for tensors on meta"),
        (
            lambda: dist.broadcast(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), 0),
            "moves numbers, not quantized",
        ),
        (lambda: dist.group.WORLD.broadcast(torch.ones(3), "1"), "'1' is none of BroadcastOptions"),
        (lambda: dist.group.WORLD.allgather([torch.ones(3)] * 2, torch.ones(3), root=1), "AllgatherOptions have no"),
    ]
    for call, text in cases:
        with pytest.raises((ValueError, TypeError), match=text):
            call()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return tensor.tolist()


def test_bad_arguments_are_errors_before_anything_starts():
    assert run_ranks(_bad_arguments, 2) == [[2.0, 2.0]] * 2


def _bare_values():
    group, mine, timeout = dist.group.WORLD, float(dist.get_rank() + 1), timedelta(seconds=30)
    new = lambda: torch.full((2,), mine)  # noqa: E731
    two = [torch.zeros(2), torch.zeros(2)]
    root, tensor = dist.get_rank() == 1, new()
    group.broadcast(tensor, 1).wait()
    found = [tensor]
    found += [tensor := new()]
    group.broadcast(tensor, root=1, timeout=timeout).wait()
    found += [tensor := new()]
    group.allreduce(tensor, ReduceOp.PRODUCT, timeout).wait()
    found += [tensor := new()]
    group.reduce(tensor, 1, ReduceOp.MIN, timeout).wait()
    found += [tensor := torch.zeros(2)]
    group.reduce_scatter(tensor, [new(), new()], op=ReduceOp.MAX).wait()
    found += [tensor := torch.zeros(2)]
    group.scatter(tensor, [new(), new() + 1] if root else [], 1, timeout).wait()
    group.gather(two if root else [], new(), 1).wait()
    group.barrier(timeout).wait()
    return [one[0].item() for one in found + two]


def test_a_group_s_own_methods_take_roots_and_operators_as_torch_s_do():
    assert run_ranks(_bare_values, 2) == [
        [2.0, 2.0, 2.0, 1.0, 2.0, 2.0, 0.0, 0.0],
        [2.0, 2.0, 2.0, 1.0, 2.0, 3.0, 1.0, 2.0],
    ]


def _gradients_asked_for_meanwhile():
    store, outcomes = c10d.default_store(), []
    for call in (dist.all_reduce, lambda t, **how: dist.reduce_scatter_tensor(t, torch.ones(2 * len(t)), **how)):
        tensor = torch.ones(4)
        if dist.get_rank() == 1:
            store.wait([f"asked {len(outcomes)}"])
            call(tensor)
        else:
            work = call(tensor, async_op=True)
            tensor.requires_grad_()
            store.set(f"asked {len(outcomes)}", "")
            work.wait()
        outcomes.append(tensor.tolist())
    return outcomes


@pytest.mark.parametrize("layout", [[0, 0], [0, 1]], ids=["one host", "two hosts"])
def test_a_result_may_be_told_to_have_gradients_while_it_is_computed(layout):
    assert run(layout, _gradients_asked_for_meanwhile) == [[[2.0] * 4] * 2] * 2


def _versions():
    seen, group = [], dist.group.WORLD
    for call in (
        dist.all_reduce,
        lambda t, **how: dist.broadcast(t, 0, **how),
        lambda t, **how: dist.reduce(t, 0, **how),
        lambda t, **how: dist.all_gather_single(t, torch.ones(2), **how),
    ):
        tensor = torch.ones(4)
        work = call(tensor, group=group, async_op=True)
        at_once = tensor._version
        work.wait()
        seen.append((at_once, tensor._version))
    return seen


def test_a_result_counts_as_written_when_its_operation_is_posted_and_no_later():
    # By then autograd may have kept it: torch 2.15's functional all_reduce with MAX does.
    assert run_ranks(_versions, 2) == [[(1, 1), (0, 0), (1, 1), (1, 1)], [(1, 1), (1, 1), (0, 0), (1, 1)]]


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _dispatched():
    tensor, gathered = torch.ones(4), torch.empty(4 * dist.get_world_size())
    with _Seen() as seen:
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(gathered, tensor)
        dist.broadcast(tensor, 0)
        tensor.mul_(2)
    return [name for name in seen.names if "copy" in name or "add" in name], "mul_.Tensor" in seen.names


def test_a_program_s_dispatch_modes_do_not_see_what_an_operation_copies():
    # Who follows samples by such a mode would take shared memory for a tensor that the program keeps.
    assert run_ranks(_dispatched, 2) == [([], True)] * 2


def _waiting_costs_no_core():
    if dist.get_rank() == 0:
        time.sleep(2.0)
        dist.barrier()
        return 0.0
    begin = time.process_time()
    dist.barrier()
    return time.process_time() - begin


def test_a_rank_that_waits_leaves_its_core_alone():
    assert run_ranks(_waiting_costs_no_core, 2)[1] < 0.2


def _engine_only():
    n = dist.get_world_size()
    assert dist.group.WORLD._channel is None
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        tensor = torch.ones(70_000, dtype=dtype)
        dist.all_reduce(tensor)
        assert (tensor == n).all()
    average = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert average[0] == (n - 1) / 2
    lists = [torch.zeros(3, dtype=torch.uint16) for _ in range(n)]
    dist.all_gather(lists, torch.full((3,), 7, dtype=torch.uint16))
    assert all((part == 7).all() for part in lists)
    scattered = torch.zeros(4)
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0 * n))
    assert torch.equal(scattered, n * torch.arange(4.0 * n)[4 * dist.get_rank() : 4 * dist.get_rank() + 4])
    received = torch.zeros(n)
    dist.all_to_all_single(received, torch.full((n,), float(dist.get_rank())))
    assert torch.equal(received, torch.arange(float(n)))
    reduced = torch.ones(3)
    dist.reduce(reduced, 0)
    assert reduced[0] == (n if dist.get_rank() == 0 else 1)
    outputs = [torch.zeros(2) for _ in range(n)] if dist.get_rank() == 1 else None
    dist.gather(torch.ones(2), outputs, 1)
    part = torch.zeros(2)
    dist.scatter(part, [torch.full((2,), float(r)) for r in range(n)] if dist.get_rank() == 0 else None, 0)
    assert part[0] == dist.get_rank()
    dist.broadcast(part, 1)
    assert part[0] == 1
    return True


def test_the_engine_serves_what_shared_memory_cannot():
    assert run_ranks(_engine_only, 3, env={"HOCKET_SHARED_MEMORY": "0"}) == [True] * 3


@pytest.mark.long
def test_no_thread_outlives_the_interpreter():
    """Such a thread may abort the process after its last line."""
    code = """
import atexit, os, threading, torch, torch.distributed as dist

def name(task):
    try:
        return open(f"/proc/self/task/{task}/comm").read().strip()
    except OSError:  # it has ended since it was listed
        return ""

def threads():
    names = [name(task) for task in os.listdir("/proc/self/task")]
    ours = [one.name for one in threading.enumerate()]
    return [name for name in names if "gloo" in name] + [name for name in ours if name == "hocket-0"]

atexit.register(lambda: print("then", threads()))  # what is registered later is called earlier
dist.init_process_group("hocket", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2), async_op=True).wait()  # a group of one has no shared memory
assert len(threads()) > 1
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=deadline(60), check=False
    )
    assert (result.returncode, result.stdout) == (0, "then []\n"), result.stderr


@pytest.mark.long
def test_the_backend_needs_no_import_of_hocket():
    code = (
        "import torch.distributed as dist; dist.init_process_group('hocket', store=dist.HashStore(), rank=0, "
        "world_size=1); import torch; t = torch.ones(2); dist.all_reduce(t); print(dist.get_backend(), t.tolist())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=deadline(60), check=True
    )
    assert result.stdout.strip() == "hocket [1.0, 1.0]"
