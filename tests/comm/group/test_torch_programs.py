"""Programs of torch and others that ask a group for more than its collectives: the numbers that they have on Gloo."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hocket.comm import CommError
from hocket.testing import run_ranks


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])


def _train(model: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _hooked(hook: Any, state: Any, bucket_mb: float = 25) -> list[float]:
    model = DistributedDataParallel(_model(), bucket_cap_mb=bucket_mb)
    model.register_comm_hook(state, hook)
    losses = _train(model, 8)
    total = torch.stack([p.detach().double().sum() for p in model.parameters()])
    lowest, highest = total.clone(), total.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    assert torch.equal(lowest, highest)
    return losses


def _posts_in_callbacks(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of a user's own whose callback sums once more, and waits for that."""

    def again(done: Any) -> torch.Tensor:
        total = done.value()[0]
        dist.all_reduce(total, async_op=True).wait()
        return dist.all_reduce(total, async_op=True).get_future().wait()[0].div_(dist.get_world_size() ** 3)

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)


def _hooks() -> list[list[float]]:
    # Several buckets whose callbacks post operations hang on Gloo.
    several = 0.01 if dist.get_backend() == "hocket" else 25
    found = [_hooked(fp16_compress_hook, None), _hooked(_posts_in_callbacks, None, several)]
    if not torch.cuda.is_available():  # where it is, PowerSGD's hook synchronises it, also for a model on the CPU
        found += [
            _hooked(powerSGD_hook, PowerSGDState(None, 2, start_powerSGD_iter=2)),
            _hooked(powerSGD_hook, PowerSGDState(None, 2, start_powerSGD_iter=2), several)[:3],
        ]
    return found


@pytest.mark.long
def test_hooks_whose_callbacks_post_operations_train_as_on_gloo() -> None:
    for mine, other in zip(run_ranks(_hooks, 2), run_ranks(_hooks, 2, backend="gloo"), strict=True):
        for ours, theirs in zip(mine, other, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)  # of float32; the order of sums differs with the buckets


def _joined(by_joined: bool) -> list[float]:
    """Rank 1 has twice as many batches as rank 0."""
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.02)
    with model.join(divide_by_initial_world_size=not by_joined):
        _train(model, 3 * (1 + dist.get_rank()))
    return [p.detach().double().sum().item() for p in model.parameters()]


@pytest.mark.parametrize("by_joined", [True, False])
def test_ranks_with_fewer_batches_join_as_on_gloo(by_joined: bool) -> None:
    assert run_ranks(_joined, 2, by_joined) == run_ranks(_joined, 2, by_joined, backend="gloo")


def _checkpoints(directory: str) -> tuple[bool, float]:
    model, other = _model(), _model()
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=directory).result()
    for p in other.parameters():
        p.data.zero_()
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=directory)
    same = all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True))
    full, sharded = model.state_dict(), _model()
    for p in sharded.parameters():
        p.data.zero_()
    fully_shard(sharded)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(sharded, full if dist.get_rank() == 0 else {}, options=options)
    wanted = _model().state_dict()
    off = [
        (p.full_tensor().cpu() - wanted[name]).abs().max().item()  # type: ignore[attr-defined]
        for name, p in sharded.named_parameters()
    ]
    return same, max(off)


def test_checkpoints_are_saved_beside_training_and_spread_from_rank_0(tmp_path: Any) -> None:
    assert run_ranks(_checkpoints, 2, str(tmp_path)) == [(True, 0.0)] * 2


def _hybrid() -> list[float]:
    model = _model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return _train(model, 3)


@pytest.mark.long
def test_hybrid_sharding_on_a_mesh_trains_as_on_gloo() -> None:
    for mine, other in zip(run_ranks(_hybrid, 4), run_ranks(_hybrid, 4, backend="gloo"), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


def _compiled(backend: str) -> list[float]:
    model = DistributedDataParallel(_model())
    return _train(torch.compile(model, backend=backend), 3)


@pytest.mark.long
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_wrapped_model_is_compiled(compiler: str) -> None:
    assert run_ranks(_compiled, 2, compiler) == run_ranks(_compiled, 2, compiler, backend="gloo")


def _futures() -> tuple[list[Any], str]:
    called: list[Any] = []
    over = threading.Event()

    def note(done: Any) -> None:
        called.append(done.value()[0].tolist())
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        over.set()

    dist.all_reduce(torch.ones(2), async_op=True).get_future().add_done_callback(note)
    assert over.wait(30)

    def waits(_: Any) -> None:
        dist.all_reduce(torch.ones(1), async_op=True).wait()

    work = dist.all_reduce(torch.ones(4_000_000), async_op=True)
    together = torch.futures.collect_all([work.get_future()])
    try:
        together.then(waits).wait()
    except Exception as error:  # torch wraps it
        return called, str(error)
    return called, CommError.__name__


def test_a_callback_never_waits_for_its_own_thread() -> None:
    for called, text in run_ranks(_futures, 2):
        assert called == [[2.0, 2.0]]
        assert "CommError" in text
