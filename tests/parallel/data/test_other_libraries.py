"""Other libraries beside `hocket.distribute`: their wrappers around its models, their loaders in its loops."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from data()


def data() -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(48, 4, generator=random), torch.randn(48, 1, generator=random))


def said_of_a_prepared_loader(kind: str) -> tuple[list[str], int]:
    """What is said while a loop goes through Accelerate's loader, and how many steps it makes."""
    from accelerate import Accelerator, DataLoaderConfiguration

    model, optimizer = nn.Linear(4, 1), torch.optim.SGD
    model, trained, _ = hocket.distribute(model, optimizer(model.parameters(), 0.1))
    split = DataLoaderConfiguration(split_batches=kind.startswith("split"), dispatch_batches="dispatched" in kind)
    plain: Any = DataLoader(Stream() if "stream" in kind else data(), batch_size=8)
    loader = plain if kind == "plain" else Accelerator(cpu=True, dataloader_config=split).prepare(plain)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        steps = 0
        for x, y in loader:
            trained.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            trained.step()
            steps += 1
    return [str(one.message) for one in said if "Accelerate's loader" in str(one.message)], steps


@pytest.mark.parametrize("kind", ["own", "own stream", "own stream, dispatched"])
def test_a_loader_of_accelerate_that_takes_a_batch_for_each_rank_is_told_of(kind: str) -> None:
    pytest.importorskip("accelerate")
    found = run_ranks(said_of_a_prepared_loader, 2, kind, timeout_s=120)
    assert [steps for _, steps in found] == [3, 3]
    assert [len(said) for said, _ in found] == [1, 0]
    assert "a step is one of 2 times as many samples" in found[0][0][0]


@pytest.mark.parametrize("kind", ["split", "split stream", "plain"])
def test_one_that_divides_each_batch_or_none_is_not(kind: str) -> None:
    pytest.importorskip("accelerate")
    assert run_ranks(said_of_a_prepared_loader, 2, kind, timeout_s=120) == [([], 6)] * 2


def rates_and_what_is_said(kind: str, trainer: bool, plan: Plan | None = None) -> tuple[list[float], list[str]]:
    """The learning rates of six steps by a schedule that Accelerate has prepared, and what is said of it."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=kind == "split"),
        step_scheduler_with_optimizer=kind != "alone",
    )
    model: Any = nn.Linear(4, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    other = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(4, 1).parameters(), 0.1), 1, 0.5)
    kept = accelerator.prepare(other) if kind == "other's" else None
    if kind != "other's":
        optimizer, schedule = accelerator.prepare(optimizer, schedule)
    loader: Any = DataLoader(data(), batch_size=8)
    rates = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if trainer:
            own = optimizer if plan is None else getattr(optimizer, "optimizer", optimizer)  # without the wrapper
            made = hocket.Trainer(model, nn.functional.mse_loss, own, plan or Plan())
            for batch in made.batches(loader):
                made.step(batch)
                schedule.step()
                rates.append(optimizer.param_groups[0]["lr"])
        else:
            model, optimizer, loader = hocket.distribute(model, optimizer, loader)
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                schedule.step()
                rates.append(optimizer.param_groups[0]["lr"])
    del kept
    return rates, [str(one.message) for one in said if "Accelerate's schedule" in str(one.message)]


@pytest.mark.parametrize("plan", [Plan(priority=True), Plan(synchronisation="local:2")])
@pytest.mark.parametrize(("kind", "told"), [("each", 1), ("other's", 0)])
def test_a_schedule_of_accelerate_is_told_of_where_replicas_are_not_compared(kind: str, told: int, plan: Plan) -> None:
    pytest.importorskip("accelerate")
    found = run_ranks(rates_and_what_is_said, 2, kind, True, plan, timeout_s=120)
    assert [len(said) for _, said in found] == [told, 0]


@pytest.mark.parametrize("trainer", [False, True])
def test_a_schedule_of_accelerate_that_goes_a_step_for_each_rank_is_told_of(trainer: bool) -> None:
    pytest.importorskip("accelerate")
    found = run_ranks(rates_and_what_is_said, 2, "each", trainer, timeout_s=120)
    assert all(rates == [0.1 * 0.25**step for step in range(1, 7)] for rates, _ in found)
    assert [len(said) for _, said in found] == [1, 0]
    assert "goes 2 steps in each step of the loop" in found[0][1][0]


@pytest.mark.parametrize(
    ("kind", "trainer"), [("split", False), ("alone", False), ("alone", True), ("other's", False), ("other's", True)]
)
def test_one_that_goes_once_is_not(kind: str, trainer: bool) -> None:
    pytest.importorskip("accelerate")
    found = run_ranks(rates_and_what_is_said, 2, kind, trainer, timeout_s=120)
    assert found == [([0.1 * 0.5**step for step in range(1, 7)], [])] * 2


def test_nor_is_one_in_one_process() -> None:
    pytest.importorskip("accelerate")
    assert run_ranks(rates_and_what_is_said, 1, "each", False, timeout_s=120)[0][1] == []


def said_of_divided_batches(samples: int, drop_last: bool, even: bool) -> list[str]:
    from accelerate import Accelerator, DataLoaderConfiguration

    model, optimizer, _ = hocket.distribute(net := nn.Linear(4, 1), torch.optim.SGD(net.parameters(), 0.1))
    rows = TensorDataset(*(one[:samples] for one in data().tensors))
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=even)
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, y in accelerator.prepare(DataLoader(rows, batch_size=8, drop_last=drop_last)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return [str(one.message) for one in said if "Accelerate's loader" in str(one.message)]


@pytest.mark.parametrize(
    ("samples", "drop_last", "even", "told"),
    [(45, False, True, 1), (45, True, True, 0), (45, False, False, 0), (40, False, True, 0)],
)
def test_a_last_batch_that_accelerate_completes_is_told_of(
    samples: int, drop_last: bool, even: bool, told: int
) -> None:
    pytest.importorskip("accelerate")
    found = run_ranks(said_of_divided_batches, 2, samples, drop_last, even, timeout_s=120)
    assert [len(said) for said in found] == [told, 0]
    assert not told or "completes the last batch, of 5, with samples of the first ones" in found[0][0]


def refusal_of_a_prepared_loader() -> str:
    from accelerate import Accelerator

    loader = Accelerator(cpu=True).prepare(DataLoader(data(), batch_size=8))
    with pytest.raises(ValueError, match="already divides the data set among ranks") as refused:
        hocket.distribute(nn.Linear(4, 1), None, loader)
    return str(refused.value)


def test_it_is_refused_as_the_loader_to_share_out() -> None:
    pytest.importorskip("accelerate")
    assert all("DataLoaderShard" in one for one in run_ranks(refusal_of_a_prepared_loader, 2, timeout_s=120))


def wrapped_though_distributed() -> tuple[str, Any, Any]:
    model = nn.Linear(4, 1)
    distributed, _, _ = hocket.distribute(model)
    with pytest.raises(ValueError, match="DistributedDataParallel would do it again") as refused:
        DistributedDataParallel(model)
    copied = [DistributedDataParallel(one) for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))]
    del distributed
    DistributedDataParallel(model)
    return str(refused.value), *(one.module.weight.shape for one in copied)


def test_the_model_itself_is_not_wrapped_while_it_is_distributed() -> None:
    found = run_ranks(wrapped_though_distributed, 2, timeout_s=120)
    assert all(one[1:] == (torch.Size([1, 4]),) * 2 for one in found)


class Slow(torch.optim.Optimizer):
    """Steps with another optimizer, and goes back half of the way each second time, as torch_optimizer's Lookahead."""

    def __init__(self, inner: torch.optim.Optimizer, name: str) -> None:  # does not call the constructor of its base
        self.param_groups, self.defaults, self.inner_name = inner.param_groups, inner.defaults, name
        setattr(self, name, inner)
        self.state: Any = {}
        self.steps, self.slow = 0, [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = getattr(self, self.inner_name).step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for group in self.param_groups:
                for slow, parameter in zip(self.slow, group["params"], strict=True):
                    slow.lerp_(parameter.data, 0.5)
                    parameter.data.copy_(slow)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        getattr(self, self.inner_name).zero_grad(set_to_none)


def train_with_a_wrapper(trainer: bool, closure: bool, name: str) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 1).double()
    optimizer: Any = Slow(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), name)
    loader: Any = DataLoader(data(), batch_size=7)
    losses = []
    if trainer:
        made = hocket.Trainer(model, lambda out, y: nn.functional.mse_loss(out, y.double()), optimizer)
        losses = [float(made.step((x.double(), y))) for x, y in made.batches(loader)]
        return losses, model.weight.tolist()
    model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    for x, y in loader:
        x, y = x.double(), y.double()

        def loss_of(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        losses.append(float(hocket.average(loss_of().detach())))
        optimizer.step(loss_of if closure else None)
    return losses, model.module.weight.tolist()


@pytest.mark.parametrize("name", ["optimizer", "base_optimizer"])
@pytest.mark.parametrize(("trainer", "closure"), [(False, False), (False, True), (True, False)])
def test_an_optimizer_around_another_that_takes_no_hooks_itself_trains_as_by_one_process(
    trainer: bool, closure: bool, name: str
) -> None:
    (alone,) = run_ranks(train_with_a_wrapper, 1, trainer, closure, name, timeout_s=120)
    for losses, weight in run_ranks(train_with_a_wrapper, 2, trainer, closure, name, timeout_s=120):
        assert losses == pytest.approx(alone[0], rel=1e-9)
        assert weight[0] == pytest.approx(alone[1][0], rel=1e-9)


def said_of_a_metric(samples: int, batch_size: int, *, training: bool) -> list[str]:
    """What is said of an epoch in which torchmetrics counts, and of one in which it does not."""
    from torchmetrics import MeanSquaredError

    model, metric = nn.Linear(4, 1), MeanSquaredError()
    random = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(samples, 4, generator=random), torch.randn(samples, 1, generator=random))
    model, optimizer, loader = hocket.distribute(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(rows, batch_size=batch_size)
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, y in loader:
            output = model(x)
            optimizer.zero_grad()
            nn.functional.mse_loss(output, y).backward()
            optimizer.step()
            if training:
                metric.update(output.detach(), y)
        with torch.no_grad():
            for x, y in hocket.shard(DataLoader(rows, batch_size=batch_size)):
                metric.update(model(x), y)
    return [str(one.message) for one in said if "torchmetrics" in str(one.message)]


def said_of_metrics() -> list[list[str]]:
    return [
        said_of_a_metric(9, 4, training=False),
        said_of_a_metric(10, 4, training=True),
        said_of_a_metric(9, 4, training=True),
    ]


def test_a_metric_that_counts_what_stands_in_for_a_sample_is_told_of() -> None:
    pytest.importorskip("torchmetrics")
    first, second = run_ranks(said_of_metrics, 2)
    assert first == [[]] * 3
    assert [len(one) for one in second] == [0, 0, 1]
    assert "MeanSquaredError of torchmetrics was updated in a batch of 1 sample" in second[2][0]
