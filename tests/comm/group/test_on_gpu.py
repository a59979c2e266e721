"""Ranks that share one GPU: collectives through CUDA IPC, messages through the host, and torch's wrappers on both."""

import functools
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from hocket.comm import CollectiveMismatchError, CollectiveTimeoutError, CommError, PeerDiedError
from hocket.testing import deadline, no_leftovers, run_ranks

from .test_random_operations import ROUNDS, programs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = "cuda"
MIB = 2**20
ranks = functools.partial(run_ranks, timeout_s=120)  # a CUDA context takes seconds


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 12))])
def test_random_programs_agree_with_numpy(seed: int) -> None:
    done = ranks(programs, 2 + seed % 3, 50 + seed, ROUNDS, GPU)
    assert max(done) > ROUNDS


def _sums(numels: list[int], dtype: torch.dtype) -> list[bool]:
    n, me = dist.get_world_size(), dist.get_rank()
    found = []
    for numel in numels:
        parts = [torch.randn(numel, generator=torch.Generator().manual_seed(r), dtype=dtype) for r in range(n)]
        mine, expected = parts[me].to(GPU), parts[0].clone()
        for part in parts[1:]:
            expected += part
        dist.all_reduce(mine)
        found.append(torch.equal(mine.cpu(), expected))
    return found


@pytest.mark.parametrize("n", [2, 3, 4])
def test_sums_of_all_lengths_are_those_in_the_order_of_ranks(n: int) -> None:
    slot = 32 * MIB // 4
    numels = [1, 255, 256 * 1024, 256 * 1024 + 1, 4 * MIB, slot - 1, slot, slot + 1, 2 * slot + 12_345]
    assert ranks(_sums, n, numels, torch.float32) == [[True] * len(numels)] * n


def _streams() -> list[float]:
    """What all_reduce finds of kernels still running, on several streams, and what follows it at once."""
    me, n, found = dist.get_rank(), dist.get_world_size(), []
    for asynchronous in (False, True):
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                big = torch.full((4 * MIB,), 1.0, device=GPU)
                torch.cuda._sleep(50_000_000)  # cycles: what follows is not there for tens of milliseconds
                for _ in range(20):
                    big = big * 1.0
                big += me
                work = dist.all_reduce(big, async_op=asynchronous)
                if asynchronous:
                    other = torch.randn(512, 512, device=GPU)
                    for _ in range(10):
                        other = other @ other / 100
                    work.wait()
                found.append((big / n).mean().item())
    return found


def test_an_operation_comes_after_what_its_stream_holds_and_before_what_follows() -> None:
    assert ranks(_streams, 2) == [[1.5] * 4] * 2


def _freed_at_once() -> bool:
    """Tensors whose last reference goes while their operations are outstanding, among allocations of the same sizes."""
    n = dist.get_world_size()
    works = []
    for number in range(100):
        tensor = torch.full((50_000,), float(number), device=GPU)
        works.append((number, dist.all_reduce(tensor, async_op=True)))
        del tensor
        torch.full((50_000,), float("nan"), device=GPU)
    return all(bool((work.result()[0] == number * n).all()) for number, work in works if work.wait())


def test_memory_of_outstanding_operations_is_not_given_to_others() -> None:
    assert ranks(_freed_at_once, 2) == [True, True]


def _futures() -> list[Any]:
    n = dist.get_world_size()
    tensor = torch.ones(1000, device=GPU)
    doubled = dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0] * 2)
    work = dist.all_reduce(torch.ones(3, device=GPU), async_op=True)
    work.wait()
    return [doubled.wait()[0].item() / n, work.get_future().wait()[0].tolist(), work.is_success()]


def test_futures_hold_tensors_of_the_gpu() -> None:
    assert ranks(_futures, 2) == [[2.0, [2.0] * 3, True]] * 2


def _messages() -> list[Any]:
    """The first operation on the GPU is a message between two of three ranks."""
    me = dist.get_rank()
    found: list[Any] = []
    for numel in (1, 1000, 3 * MIB):
        values = torch.arange(numel, device=GPU, dtype=torch.float32)
        if me == 0:
            dist.send(values, 1)
        elif me == 1:
            received = torch.zeros(numel, device=GPU)
            dist.recv(received, 0)
            found.append(torch.equal(received, values))
    if me == 2:
        dist.send(torch.full((5,), 7, device=GPU), 0)
    elif me == 0:
        received = torch.zeros(5, device=GPU, dtype=torch.int64)
        work = dist.irecv(received, 2)
        limit_s = time.monotonic() + deadline(20)
        while not work.is_completed() and time.monotonic() < limit_s:
            time.sleep(0.01)
        found.append(received.tolist())
    dist.all_reduce(total := torch.ones(2, device=GPU))
    wide = torch.zeros(4, 6, device=GPU)
    if me == 1:
        dist.send(torch.ones(6, 4, device=GPU).t(), 2)
    elif me == 2:
        dist.recv(wide[:, ::1], 1)
        found.append(wide.sum().item())
    return [*found, total.tolist()]


def test_messages_between_two_of_three_ranks() -> None:
    assert ranks(_messages, 3) == [
        [[7] * 5, [3.0, 3.0]],
        [True, True, True, [3.0, 3.0]],
        [24.0, [3.0, 3.0]],
    ]


def _both_devices() -> list[Any]:
    n = dist.get_world_size()
    works = []
    for number in range(30):
        tensor = torch.full((1000 + number,), 1.0, device=GPU if number % 2 else "cpu")
        works.append((tensor, dist.all_reduce(tensor, async_op=True)))
    for _, work in works:
        work.wait()
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for group in groups:
        if dist.get_rank(group) >= 0:
            dist.all_reduce(value := torch.ones(10, device=GPU), group=group)
            assert value.sum() == 20
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"tensor": torch.ones(2, device=GPU), "rank": dist.get_rank()})
    return [all(bool((t == n).all()) for t, _ in works), [one["rank"] for one in objects]]


def test_tensors_of_both_devices_and_groups_of_some_ranks() -> None:
    assert ranks(_both_devices, 3) == [[True, [0, 1, 2]]] * 3


def _wrong() -> list[str]:
    me, found = dist.get_rank(), []
    for tensor in (
        torch.ones(4 + me, device=GPU),
        torch.ones(4, device=GPU, dtype=(torch.float32, torch.float64)[me]),
    ):
        try:
            dist.all_reduce(tensor)
        except CollectiveMismatchError as error:
            found.append(str(error))
    try:
        dist.all_gather([torch.zeros(3), torch.zeros(3)], torch.zeros(3, device=GPU))
    except ValueError as error:
        found.append(str(error))
    dist.all_reduce(value := torch.ones(3, device=GPU))
    return [*found, value.tolist()]  # type: ignore[list-item]


def test_what_differs_between_ranks_is_refused_on_all_and_the_group_stays_usable() -> None:
    for lengths, types, devices, value in ranks(_wrong, 2):
        assert "4" in lengths
        assert "5" in lengths
        assert "float64" in types
        assert "cuda" in devices
        assert value == [2.0] * 3  # type: ignore[comparison-overlap]


def _one_does_not_come() -> tuple[str, tuple[int, ...]] | None:
    if dist.get_rank() == 1:
        time.sleep(deadline(5))
        return None
    try:
        dist.all_reduce(torch.ones(3, device=GPU))
    except CollectiveTimeoutError as error:
        return str(error), error.missing
    return None


def test_a_rank_that_does_not_come_to_the_first_operation_is_named() -> None:
    found = ranks(_one_does_not_come, 3, group_timeout_s=2.0, allow_late={1})
    for text, missing in (found[0], found[2]):
        assert missing == (1,)
        assert "rank 1" in text


def _killed() -> tuple[str, float] | None:
    dist.all_reduce(torch.ones(1000, device=GPU))
    if dist.get_rank() == 1:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            dist.all_reduce(torch.ones(MIB, device=GPU))
            dist.all_gather([torch.ones(MIB, device=GPU) for _ in range(3)], torch.ones(MIB, device=GPU))
    except CommError as error:
        return f"{type(error).__name__}: {error}", time.monotonic()


def test_who_dies_is_named_at_once() -> None:
    with no_leftovers():
        found = ranks(_killed, 3, expect_death={1})
    for rank in (0, 2):
        assert found[rank][0].startswith(f"{PeerDiedError.__name__}: ")
        assert "rank 1 " in found[rank][0]


def _out_of_memory() -> str:
    """An operation that cannot get memory on one rank: a strided tensor needs a copy."""
    dist.all_reduce(torch.ones(1000, device=GPU))
    try:
        tensor = torch.ones(2 * MIB, device=GPU)[::2]
        if dist.get_rank() == 0:
            torch.cuda.set_per_process_memory_fraction(1e-4)
        dist.all_reduce(tensor)
    except (CommError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_memory_that_lacks_on_one_rank_is_told_to_all() -> None:
    first, second = ranks(_out_of_memory, 2)
    assert first.startswith("OutOfMemoryError")
    assert "rank 0" in second


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(64, 8)).to(GPU, torch.float64)


def _losses(model: Any, steps: int = 6, parts: int = 1, part: int = 0) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for step in range(steps):
        data = torch.randn(12, 64, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        mine = data.chunk(parts)[part].to(GPU)
        optimizer.zero_grad()
        loss = model(mine).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _ddp(hook: str = "") -> list[float]:
    n, me = dist.get_world_size(), dist.get_rank()
    model = DistributedDataParallel(_model(), device_ids=[0], bucket_cap_mb=0.05)
    if hook == "powersgd":
        model.register_comm_hook(PowerSGDState(None, 8, start_powerSGD_iter=2), powerSGD_hook)
    elif hook:
        model.register_comm_hook(None, {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}[hook])
    return _mean(_losses(model, parts=n, part=me))


def _fsdp(mesh: bool = False) -> list[float]:
    model = _model()
    where = init_device_mesh(GPU, (2, 2), mesh_dim_names=("replicate", "shard")) if mesh else None
    for layer in model:
        fully_shard(layer, mesh=where)  # type: ignore[arg-type]
    fully_shard(model, mesh=where)
    return _mean(_losses(model, parts=dist.get_world_size(), part=dist.get_rank()))


def _mean(losses: list[float]) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()  # type: ignore[no-any-return]


def _alone() -> list[float]:
    return _losses(_model())


@pytest.mark.parametrize(
    ("program", "n", "arguments"), [(_ddp, 2, ()), (_ddp, 3, ()), (_fsdp, 2, ()), (_fsdp, 4, (True,))]
)
def test_torch_s_wrappers_train_as_one_process(program: Any, n: int, arguments: tuple[Any, ...]) -> None:
    (alone,) = ranks(_alone, 1, backend=None)
    for losses in ranks(program, n, *arguments):
        assert losses == pytest.approx(alone, rel=1e-9)  # float64; kernels add in another order for other batches


@pytest.mark.parametrize(("hook", "off"), [("fp16", 1e-2), ("bf16", 5e-2), ("powersgd", 0.3)])
def test_hooks_of_ddp_run(hook: str, off: float) -> None:
    (alone,) = ranks(_alone, 1, backend=None)
    first, second = ranks(_ddp, 2, hook)
    assert first == second
    assert first == pytest.approx(alone, rel=off)  # gradients of 11 and 8 bits, or of rank 8


def _dtensors() -> list[Any]:
    torch.cuda.set_device(0)  # else torch takes the GPU of the rank's number on its host
    mesh = init_device_mesh(GPU, (dist.get_world_size(),))
    whole = torch.arange(24.0, device=GPU).reshape(6, 4)
    divided = distribute_tensor(whole, mesh, [Shard(0)])
    product = divided @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate()])
    turned = divided.redistribute(mesh, [Shard(1)])
    functional = all_reduce(torch.ones(3, device=GPU), "sum", dist.group.WORLD)
    gathered = all_gather_tensor(torch.ones(2, device=GPU), 0, dist.group.WORLD)
    return [
        torch.equal(product.full_tensor(), whole @ whole.t()),
        torch.equal(turned.full_tensor(), whole),
        functional.tolist(),
        gathered.numel(),
    ]


def test_dtensors_and_functional_collectives() -> None:
    assert ranks(_dtensors, 2) == [[True, True, [2.0] * 3, 4]] * 2


def _many_groups() -> float:
    """Bytes of the GPU that fifty groups leave behind, in MiB."""
    n = dist.get_world_size()
    dist.all_reduce(torch.ones(5, device=GPU))
    before, _ = torch.cuda.mem_get_info()
    for _ in range(50):
        group = dist.new_group(list(range(n)))
        dist.all_reduce(torch.ones(5, device=GPU), group=group)
        dist.destroy_process_group(group)
    dist.barrier()
    after, _ = torch.cuda.mem_get_info()
    dist.barrier()
    return (before - after) / MIB


def test_groups_that_go_give_back_the_memory_of_the_gpu() -> None:
    assert max(ranks(_many_groups, 2)) < 200  # a pair of slots of two ranks takes 128 MiB


def _alone_in_its_group() -> list[Any]:
    """NCCL serves ranks that have a GPU each; here one rank is one."""
    tensor = torch.arange(4.0, device=GPU)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dist.all_gather_into_tensor(whole := torch.zeros(4, device=GPU), tensor)
    dist.reduce_scatter_tensor(part := torch.zeros(4, device=GPU), whole)
    work = dist.all_reduce(part, async_op=True)
    work.wait()
    parts = [torch.zeros(4, device=GPU)]
    dist.all_gather(parts, tensor)
    dist.all_to_all_single(turned := torch.zeros(4, device=GPU), parts[0])
    dist.barrier()
    return [turned.tolist(), part.tolist()]


def test_one_rank_with_a_gpu_of_its_own_runs_on_nccl() -> None:
    values = [0.0, 1.0, 2.0, 3.0]
    assert ranks(_alone_in_its_group, 1) == [[values, values]]
