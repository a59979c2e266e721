"""`hocket.distribute` and what it returns, as a program meets it."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.parallel import DataParallel, DistributedLoader
from hocket.testing import RankError, deadline, run_ranks

from ..programs import arrays


def start_apart() -> tuple[bool, bool, str]:
    """Ranks begin with different models; only rank 0 has a state of the optimizer and the right learning rate."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1).double())
    model[1].num_batches_tracked.fill_(rank)
    model[1].running_mean.fill_(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 if rank == 0 else 0.5)
    if rank == 0:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    optimizer_given = optimizer
    wrapped, optimizer, loader = hocket.distribute(model, optimizer)
    assert optimizer is optimizer_given
    assert loader is None
    mine = pickle.dumps([arrays(model.state_dict().values()), arrays(s["exp_avg"] for s in optimizer.state.values())])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    several = [torch.optim.SGD(layer.parameters(), lr=0.1 if rank == 0 else 0.5) for layer in model]
    _, found, _ = hocket.distribute(model, several)
    assert found is several
    rates = {one.param_groups[0]["lr"] for one in (optimizer, *several)}
    return len(set(everyone)) == 1, rates == {0.1}, type(wrapped).__name__


@pytest.mark.parametrize("backend", ["hocket", "gloo"])
def test_all_ranks_start_as_rank_0(backend: str) -> None:
    assert run_ranks(start_apart, 3, backend=backend) == [(True, True, "DataParallel")] * 3


def other_shape() -> None:
    hocket.distribute(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2 + (dist.get_rank() == 2))))


def one_more() -> None:
    hocket.distribute(nn.ModuleList(nn.Linear(2, 2) for _ in range(2 - dist.get_rank())))


def other_type() -> None:
    model = nn.BatchNorm1d(2)
    if dist.get_rank() == 1:
        model.running_var = model.running_var.double()
    hocket.distribute(model)


def no_shape() -> None:
    hocket.distribute(nn.LazyLinear(3))


@pytest.mark.parametrize(
    ("program", "n", "message"),
    [
        (
            other_shape,
            3,
            r"on rank 2 .*: parameter '1\.weight' of shape \[3, 4\] .* of shape \[2, 4\]",
        ),
        (one_more, 2, r"on rank 1 is not that of rank 0: nothing more against parameter '1\.weight'"),
        (other_type, 2, r"on rank 1 .* buffer 'running_var' of shape \[2\] and type torch\.float64 against .*float32"),
        (no_shape, 2, r"parameter 'weight' has no shape yet: run the model once on a sample first"),
    ],
)
def test_models_that_cannot_be_trained_together_are_named(program: Any, n: int, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(program, n)


def join() -> tuple[str, int, float]:
    model = hocket.distribute(nn.Linear(1, 1))[0]
    model(torch.ones(1, 1) * (1 + dist.get_rank())).sum().backward()
    return dist.get_backend(), dist.get_world_size(), model.weight.grad.item()


def test_the_world_of_the_launcher_is_joined() -> None:
    assert run_ranks(join, 2, backend=None) == [("hocket", 2, 1.5)] * 2


def subgroup() -> Any:
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    model = nn.Linear(1, 1, bias=False)
    mine = groups[dist.get_rank() % 2]
    data = TensorDataset(torch.arange(5.0).view(5, 1))
    model, _, loader = hocket.distribute(model, None, DataLoader(data, batch_size=5), group=mine)
    (batch,) = loader
    model(batch[0]).mean().backward()
    average = hocket.average(batch[0].mean(), group=mine)
    return len(batch[0]), model.weight.grad.item(), hocket.total(1, group=mine), average.item()


def test_a_group_may_be_only_some_of_the_ranks() -> None:
    a, b, c = run_ranks(subgroup, 3)
    assert a == (3, pytest.approx(2.0), 2, pytest.approx(2.0))
    assert b == (5, pytest.approx(2.0), 1, pytest.approx(2.0))
    assert c == (2, pytest.approx(2.0), 2, pytest.approx(2.0))


def numbers() -> list[Any]:
    rank = dist.get_rank()
    tensor = torch.tensor([1.0, 2.0]) * (rank + 1)
    table = torch.arange(4).view(2, 2).t()
    several = hocket.total(rank, True, 0.5, tensor, table, torch.tensor(rank))
    average = hocket.average(float(rank))
    return [
        hocket.total(2**53 + rank),
        [v.tolist() if isinstance(v, torch.Tensor) else v for v in several],
        [type(v).__name__ for v in several],
        average,
        tensor.tolist() == [rank + 1.0, 2 * rank + 2.0],
    ]


@pytest.mark.parametrize("backend", ["hocket", "gloo"])
def test_totals_keep_kind_and_value(backend: str) -> None:
    kinds = ["int", "int", "float", "Tensor", "Tensor", "Tensor"]
    values = [3, 3, 1.5, [6.0, 12.0], [[0, 6], [3, 9]], 3]
    assert run_ranks(numbers, 3, backend=backend) == [[3 * 2**53 + 3, values, kinds, 1.0, True]] * 3


def test_totals_of_one_process() -> None:
    assert hocket.total(3) == 3
    assert hocket.total(True, 2.5) == (1, 2.5)
    with pytest.raises(TypeError, match="can add up numbers and tensors over ranks, not str"):
        hocket.total("3")
    with pytest.raises(TypeError, match="at least one value"):
        hocket.total()


def evaluate_with_statistics() -> tuple[list[Any], bool]:
    torch.manual_seed(0)
    model = hocket.distribute(nn.BatchNorm1d(2, affine=False))[0]
    extra = hocket.distribute(nn.Sequential(nn.BatchNorm1d(2)), broadcast_buffers=False)[0]
    x = torch.randn(4, 2) + dist.get_rank()
    model(x), extra(x)  # statistics come apart
    apart = arrays(model.buffers())
    model.eval()
    list(hocket.shard([torch.ones(3)]))
    together = arrays(model.buffers())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pickle.dumps([apart, together, arrays(extra.buffers())]))
    ranks = [pickle.loads(g) for g in gathered]
    return [pickle.dumps(r[1]) == pickle.dumps(ranks[0][0]) for r in ranks], pickle.dumps(ranks[0][2]) != pickle.dumps(
        ranks[1][2]
    )


def test_evaluation_uses_rank_0_s_statistics_everywhere() -> None:
    assert run_ranks(evaluate_with_statistics, 3) == [([True] * 3, True)] * 3


# --- one process ----------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) / self.temperature

    def describe(self) -> str:
        return f"at {self.temperature}"


def test_the_model_keeps_its_face() -> None:
    inner = Model()
    model = hocket.distribute(inner)[0]
    assert model.module is inner
    model.temperature = 2.0
    assert inner.temperature == 2.0
    assert model.describe() == "at 2.0"
    model.own = 3
    assert not hasattr(inner, "own")
    assert list(model.state_dict()) == list(inner.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in inner.named_parameters()]
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in inner.named_buffers()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in inner.named_modules()]
    assert model.get_submodule("net.0") is inner.net[0]
    model.eval()
    assert not inner.net[1].training
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'temprature'"):
        _ = model.temprature


def test_state_goes_to_and_from_the_plain_model() -> None:
    one, two = Model(), Model()
    model = hocket.distribute(one)[0]
    model.load_state_dict(two.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    Model().load_state_dict(model.state_dict())


def test_copies_and_pickles_are_of_the_model_alone() -> None:
    inner = Model()
    model = hocket.distribute(inner)[0]
    twin = copy.deepcopy(model)
    assert type(twin) is Model
    assert twin.net is not inner.net
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=False)) is Model


def test_sequences_stay_sequences() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = hocket.distribute(inner)[0]
    assert len(model) == 2
    assert model[1] is inner[1]
    assert list(model) == list(inner)
    assert hocket.distribute(nn.ModuleList())[0]


def test_nothing_is_distributed_twice() -> None:
    model, _, loader = hocket.distribute(Model(), None, [torch.ones(2)])
    assert type(model) is DataParallel
    assert type(loader) is DistributedLoader
    with pytest.raises(ValueError, match="must not be distributed again"):
        hocket.distribute(model)
    with pytest.raises(ValueError, match="must not be distributed again"):
        hocket.distribute(Model(), None, loader)
    with pytest.raises(ValueError, match="this model is distributed already"):
        hocket.distribute(model.module)
    inner = model.module
    model.circle = [model]
    del model
    assert hocket.distribute(inner)[0].module is inner, "who let go of the first may distribute anew"


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, not int"):
        hocket.distribute(3)
    with pytest.raises(ValueError, match='loss_reduction must be "mean" or "sum", not \'avg\''):
        hocket.distribute(nn.Linear(1, 1), loss_reduction="avg")
    with pytest.raises(TypeError, match="must be a torch.optim.Optimizer, not DataLoader; without one pass None"):
        hocket.distribute(nn.Linear(1, 1), torch.utils.data.DataLoader([1, 2]))


def _refused_on(rank: int, program: Callable[[], Any]) -> str:
    try:
        program()
    except ValueError as error:
        return str(error)
    return f"rank {rank} was not refused"


def _distributes_what_is_distributed() -> list[str]:
    """What each rank is told, and that the group is in step after each refusal."""
    rank = dist.get_rank()
    sharded = nn.Sequential(nn.Linear(4, 4))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    divided = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    divided.weight = nn.Parameter(distribute_tensor(divided.weight.detach(), mesh, [Shard(0)]))
    other, whole = nn.Linear(4, 4), nn.Linear(4, 4)
    extra = nn.Parameter(torch.zeros(3))
    programs: list[Callable[[], Any]] = [
        lambda: hocket.distribute(DistributedDataParallel(nn.Linear(4, 4))),
        lambda: hocket.distribute(nn.Sequential(DistributedDataParallel(nn.Linear(4, 4)))),
        lambda: hocket.Trainer(DistributedDataParallel(whole), None, torch.optim.SGD(whole.parameters())),
        lambda: hocket.distribute(sharded),
        lambda: hocket.distribute(divided),
        lambda: DistributedDataParallel(hocket.distribute(nn.Linear(4, 4))[0]),
        lambda: hocket.distribute(nn.Linear(4, 4), torch.optim.SGD(other.parameters())),
        lambda: hocket.distribute(other, torch.optim.SGD([*other.parameters(), extra])),
    ]
    found = [_refused_on(rank, program) for program in programs]
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    both = torch.optim.SGD([*first.parameters(), *second.parameters()])
    kept = hocket.distribute(first)[0]
    hocket.distribute(second, both)
    dist.barrier()
    return [*found, type(kept).__name__]


def test_what_would_be_averaged_twice_or_never_is_refused() -> None:
    ddp = "the model is distributed by DistributedDataParallel already"
    for found in run_ranks(_distributes_what_is_distributed, 2):
        assert [text[: len(ddp)] for text in found[:3]] == [ddp] * 3
        assert found[3].startswith("the model is distributed by fully_shard already")
        assert found[4].startswith("the model is distributed by DTensor already")
        assert found[5].startswith("hocket.distribute averages this model's gradients already")
        assert found[6].startswith("the optimizer has none of the model's parameters")
        assert found[7].startswith("the optimizer trains parameters that the model has not (1, of shapes (3,))")
        assert found[8] == "DataParallel"


SCRIPT = """
import torch, hocket
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(10, 4), torch.randn(10, 1))
model, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
for x, y in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    mean = hocket.average(loss).item()
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(f"{mean:.5f}")
"""


def output_of(command: list[str], **env: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=deadline(90),
        env={**os.environ, **env},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line.rpartition("] ")[2] for line in done.stdout.splitlines()]


@pytest.mark.long
def test_one_script_runs_alone_under_hocket_and_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    alone = output_of([str(script)])
    assert len(alone) == 3
    assert output_of(["-m", "hocket", "run", "-n", "2", str(script)]) == alone
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    assert output_of(torchrun, OMP_NUM_THREADS="1", TMPDIR=str(tmp_path)) == alone  # which it leaves something in


def compiled(order: str) -> list[bool]:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    twin = copy.deepcopy(inner)
    if order == "before":
        model = hocket.distribute(torch.compile(inner, backend="aot_eager"))[0]
    else:
        model = torch.compile(hocket.distribute(inner)[0], backend="aot_eager")
    same = []
    for step in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for m in (model, twin):
            m.zero_grad()
            m(x).square().mean().backward()
        for mine, plain in zip(inner.parameters(), twin.parameters(), strict=True):
            mean = plain.grad.clone()
            dist.all_reduce(mean)
            same.append(torch.allclose(mine.grad, mean / dist.get_world_size()))
    return same


def compiled_before_and_after() -> list[list[bool]]:
    return [compiled(order) for order in ("before", "after")]


@pytest.mark.long
def test_a_compiled_model_may_be_distributed_and_the_other_way_round() -> None:
    assert run_ranks(compiled_before_and_after, 2, timeout_s=100) == [[[True] * 12] * 2] * 2


class Followed(nn.Module):
    """A teacher follows its student in each forward pass in training."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.student.weight, 0.1)
        return (self.student(x) - self.teacher(x)).square().mean(1)


def said_of_models_that_are_run_once_more() -> list[str]:
    said = []
    words, numbers = torch.arange(8)[:, None], torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    frequent = nn.Sequential(nn.Embedding(8, 4, scale_grad_by_freq=True), nn.Flatten())
    for model, x in ((Followed(), numbers), (frequent, words)):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        wrapped, _, loader = hocket.distribute(model, optimizer, DataLoader(TensorDataset(x), batch_size=8))
        (batch,) = next(iter(loader))
        with pytest.raises(RuntimeError) as error:
            wrapped(batch)
        said.append(str(error.value))
    return said


def test_models_whose_passes_change_parameters_or_count_lookups_are_refused() -> None:
    for followed, frequent in run_ranks(said_of_models_that_are_run_once_more, 2):
        assert "each forward pass changes parameter 'teacher.weight'" in followed
        assert "0 has scale_grad_by_freq" in frequent


FACTOR = nn.Parameter(torch.zeros((), dtype=torch.float64))
SINGLE = {
    "mse": nn.functional.mse_loss,
    "dice of each": lambda x, y: (1 - 2 * (x.sigmoid() * y).sum(1) / (x.sigmoid() + y).sum(1)).mean(),
    "dice of the batch": lambda x, y: 1 - 2 * (x.sigmoid() * y).sum() / (x.sigmoid() + y).sum(),
    "root": lambda x, y: nn.functional.mse_loss(x, y).sqrt(),
    "dice of classes": lambda x, y: (1 - 2 * (x.sigmoid() * y).sum(0) / (x.sigmoid() + y).sum(0)).mean(),
    "entropy of a mean": lambda x, y: nn.functional.mse_loss(x, y) + x.reshape(-1, 3).sigmoid().mean(0).log().mean(),
    "learned factor": lambda x, y: nn.functional.mse_loss(x, y) * FACTOR.exp(),
}


QUEUE = torch.randn(5, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _entropy(rows: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(nn.functional.normalize(rows) @ classes.T, torch.arange(len(rows)))


COMPARED = {
    "negatives of the batch": _entropy,
    "and a term of each": lambda x, y: nn.functional.mse_loss(x, y) + 0.1 * _entropy(x, y),
    "pairs, each with a sigmoid": lambda x, y: (
        -((2 * torch.eye(len(x)) - 1) * (x @ (x * y).T)).sigmoid().log().sum(1).mean()
    ),
    "triplet by flip": lambda x, y: nn.functional.triplet_margin_loss(x, y, x.flip(0)),
    "triplet by roll": lambda x, y: nn.functional.triplet_margin_loss(x, y, y.roll(1, 0)),
    "mined": lambda x, y: (torch.cdist(x, x).max(1).values - torch.cdist(x, y).min(1).values + 0.2).relu().mean(),
    "normalised": lambda x, y: -(x.mean(1) * (y[:, 0] - y[:, 0].mean())).mean(),
    "deviation": lambda x, _: (1 - (x.var(0, unbiased=False) + 1e-4).sqrt()).relu().mean(),
}
ALONE = {
    "negatives of a queue": lambda x, y: nn.functional.cross_entropy(
        torch.cat([(x * y).sum(1, keepdim=True), x @ QUEUE.T], 1), torch.zeros(len(x), dtype=torch.int64)
    ),
    "a hinge": lambda x, _: nn.functional.mse_loss(x, x * 0 + 1) + (x.abs() - 1e3).relu().mean(),
    "a weight that grows": lambda x, y: (
        nn.functional.mse_loss(x, y) + 0.0 * x.exp().mean() + x.mean() * torch.zeros(())
    ),
    "a product of each": lambda x, y: -torch.einsum("bd,bd->b", x, y).sigmoid().log().mean(),
    "flipped features": lambda x, y: (x * y.flip(1) * x.roll(2, 1)).mean(),
    "by count": lambda x, y: (x - y).square().mean(1).sum() / len(x),
    "by a tensor": lambda x, y: ((x - y).square().mean(1) * (y[:, 0] > -1)).sum() / (y[:, 0] > -1).sum().clamp(min=1),
}
RIGHT = SINGLE | ALONE
COUNTED = {
    "a count of Python": lambda x, y: (x - y).square().mean(1)[y[:, 0] > 0.1].sum() / max(1, int((y[:, 0] > 0.1).sum()))
}


def _told_of_one_sample(losses: str, words: str) -> set[str]:
    """Return those of such losses, by the name of their table, of which a loop is told that has one sample a rank."""
    found = set()
    for name, loss in globals()[losses].items():
        torch.manual_seed(0)
        net = nn.Linear(4, 6).double()
        data = TensorDataset(torch.randn(4, 4).double(), torch.rand(4, 6).double())
        loader = DataLoader(data, batch_size=2)
        model, optimizer, batches = hocket.distribute(net, torch.optim.SGD(net.parameters(), 0.1), loader)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for x, y in batches:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
        found |= {name for one in told if words in str(one.message)}
    return found


def test_a_loss_of_one_sample_that_is_no_usual_mean_is_told() -> None:
    told = run_ranks(_told_of_one_sample, 2, "SINGLE", "a rank has one sample")[0]
    assert told == {"dice of the batch", "root", "dice of classes", "entropy of a mean"}


def test_a_loss_that_compares_one_sample_with_none_is_told() -> None:
    """With two samples for each rank they were refused; with one all was silent, and up to 1.4 off."""
    assert run_ranks(_told_of_one_sample, 2, "COMPARED", "seems to compare samples (")[0] == set(COMPARED)
    assert run_ranks(_told_of_one_sample, 2, "RIGHT", "seems to compare samples (")[0] == set()


def test_a_count_of_one_sample_that_is_a_number_of_python_is_told() -> None:
    """It is 1 on each rank where anything counts: 7e-1 off, and silent."""
    assert run_ranks(_told_of_one_sample, 2, "COUNTED", "divides a sum by 1")[0] == set(COUNTED)
    assert run_ranks(_told_of_one_sample, 2, "RIGHT", "divides a sum by 1")[0] == set()
