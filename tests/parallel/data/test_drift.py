"""Replicas do not drift apart in silence, and a loop's loss is that of one device or refused."""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import hocket
from hocket.parallel.data._replica_marks import alike, marks_of
from hocket.planner import Plan
from hocket.testing import run_ranks

SAMPLES = 48
TRAINERS = (Plan(shard="parameters"), Plan(pipeline_parallel_degree=2), Plan(tensor_parallel_degree=2))
REDUCTIONS = ("mean", "sum")
LOST = re.compile("global batch|more than it counts|another of its batch|in parts|after a part")


def everything() -> dict[str, Any]:
    return {
        "alone": decided_alone(),
        "trainers": [of_a_trainer(plan) for plan in TRAINERS],
        "searched": [searched("strong_wolfe", reduction) for reduction in REDUCTIONS],
        "losses": losses(),
        "gradients": gradients(),
        "parts": in_parts(),
        "scaled": scaled(),
        "changed": changed(),
        "sequences": sequences(),
        "two models": two_models(),
        "by hand": by_hand(),
        "sampled": sampled(),
        "out of step": out_of_step(),
        "in place": in_place(),
        "quantized": in_place(Quantized),
        "left out": [left_out(least, every) for least, every in ((4, 1), (0, 1), (4, 2))],
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return run_ranks(everything, 2, timeout_s=110)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1)).double()
    return TensorDataset(x, x[:, :3] * x[:, 3:])


class Shifting(nn.Module):
    """Changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.sub_(0.5).mul_(2))


class Quantized(Shifting):
    """Has weights that are whole numbers, and signs of them."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(-9, 9, (6, 6)).to(torch.int8), requires_grad=False)
        self.signs = nn.Parameter(self.codes > 0, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ torch.where(self.signs, self.codes, -self.codes).to(x) / 9)


def in_place(kind: type[nn.Module] = Shifting) -> list[float]:
    """The losses of such a model, by a loop that changes targets, too."""
    torch.manual_seed(0)
    model: Any = kind()
    loader: Any = DataLoader(data(), batch_size=8)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    if dist.is_initialized():
        model, optimizer, loader = hocket.distribute(model, optimizer, loader)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y.mul_(0.5))
        loss.backward()
        optimizer.step()
        losses.append(float(hocket.average(loss.detach())))
    return losses


@pytest.mark.long
def test_a_model_may_change_its_inputs_in_place(ranks: list[dict[str, Any]]) -> None:
    """Looks at the first batch had changed it before the loop's own pass."""
    alone = in_place()
    assert [one["in place"] for one in ranks] == [pytest.approx(alone, rel=1e-12)] * 2


def test_weights_may_be_whole_numbers(ranks: list[dict[str, Any]]) -> None:
    alone = in_place(Quantized)
    assert [one["quantized"] for one in ranks] == [pytest.approx(alone, rel=1e-12)] * 2


def error_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except RuntimeError as error:
        return str(error)
    return ""


def trained(after: Callable[[Any, Any, int], None], *, loader: bool = True, updates: bool = True) -> str:
    """Train for two epochs, and call `after` each step; return the error that this ends in."""
    model, made = network(), DataLoader(data(), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    distributed, optimizer, shared = hocket.distribute(model, optimizer, made if loader else None)
    rank = dist.get_rank()

    def run() -> None:
        for _ in range(2):
            for x, y in shared if loader else made:
                optimizer.zero_grad()
                nn.functional.mse_loss(distributed(x), y).backward()
                if updates or rank == 0:
                    optimizer.step()
                after(distributed, optimizer, rank)

    return error_of(run)


def decided_alone() -> list[str]:
    """The errors of programs that do on one rank what they do not on the other."""

    def nothing(*_: Any) -> None: ...

    def rate(_: Any, optimizer: Any, rank: int) -> None:
        optimizer.param_groups[0]["lr"] *= 1 - 0.5 * rank

    def weights(model: Any, _: Any, rank: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.001 * rank)

    def alike(model: Any, optimizer: Any, _: int) -> None:
        optimizer.param_groups[0]["lr"] *= 0.9
        weights(model, optimizer, 1)

    return [
        trained(rate), trained(weights), trained(nothing, updates=False), trained(rate, loader=False),
        trained(weights, loader=False), trained(alike), trained(alike, loader=False),
    ]  # fmt: skip


def test_unlike_values_of_two_ranks_are_never_taken_for_one() -> None:
    """Of 2000 values some thirty pairs are alike in 16 bits."""
    marks = [tuple(marks_of([value])) for value in range(2000)]
    assert len(set(marks)) == len(marks)
    assert alike([2 * one for one in marks[0]], 2)
    assert not alike([sum(pair) for pair in zip(*marks[:2], strict=True)], 2)


def test_what_one_rank_decides_alone_is_an_error_of_all(ranks: list[dict[str, Any]]) -> None:
    """A learning rate by the local loss, an update left out, a weight changed: models drifted apart without a word."""
    first, other = (one["alone"] for one in ranks)
    assert first == other
    rate, weights, updates, rate_alone, weights_alone, *alike = first
    assert "lr is 0.1 on rank 0 and 0.05 on rank 1" in rate
    assert "hocket.average(loss)" in rate
    assert rate_alone.startswith("the optimizer is not the same on all ranks")
    assert "parameter '0.weight' is no longer the same on all ranks" in weights or "0.bias" in weights
    assert "is no longer the same on all ranks" in weights_alone
    assert "rank 0 has made 1 updates and rank 1 0" in updates
    assert alike == ["", ""]


def of_a_trainer(plan: Plan) -> str:
    model = network()
    if plan.tensor_parallel_degree > 1:  # every rank holds all that is trained, and a part of what is frozen
        model[:2].requires_grad_(False)
        model[2].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    x, y = (torch.stack(one) for one in zip(*(data()[i] for i in range(8)), strict=True))
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan, sample=x)

    def run() -> None:
        for step in range(12):
            trainer.step((x, y))
            optimizer.param_groups[0]["lr"] *= 1 - 0.5 * dist.get_rank() * (step > 5)

    return error_of(run)


@pytest.mark.parametrize("number", range(len(TRAINERS)))
def test_a_rate_that_one_rank_lowers_is_an_error_of_a_trainer_s_step(ranks: list[dict[str, Any]], number: int) -> None:
    for one in ranks:
        said = one["trainers"][number]
        assert "lr is 0.1 on rank 0 and 0.05 on rank 1" in said or "lr is 0.1 on rank 0 and 0.025 on rank 1" in said


def searched(line_search: str | None, reduction: str) -> list[float]:
    """Weights after some steps of L-BFGS, which decides by the loss that its closure gives."""
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)
    loader = DataLoader(data(), batch_size=SAMPLES)
    distributed, optimizer, shared = hocket.distribute(model, optimizer, loader, loss_reduction=reduction)
    for _ in range(3):
        for x, y in shared:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(distributed(x), y, reduction=reduction)
                loss.backward()
                return loss

            optimizer.step(closure)
    return [float(p.detach().sum()) for p in model.parameters()]


@pytest.mark.parametrize("number", range(len(REDUCTIONS)))
def test_a_line_search_finds_what_that_of_one_process_finds(ranks: list[dict[str, Any]], number: int) -> None:
    """Each rank searched along the loss of its own samples."""
    alone = searched("strong_wolfe", REDUCTIONS[number])
    for one in ranks:
        assert one["searched"][number] == pytest.approx(alone, rel=1e-9)  # sums in another order


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda output, y: ((output - y) ** 2).sum(),
    "of the function": lambda output, y: nn.functional.mse_loss(output, y, reduction="sum"),
    "autoencoder": lambda o, y: nn.functional.mse_loss(o, y) - 0.5 * torch.sum(1 + o - o.pow(2) - o.exp()),
    "masked": lambda output, y: ((output - y) ** 2 * (y > 0)).sum(),
    "of classes": lambda output, y: nn.functional.cross_entropy(output, y.argmax(1), reduction="sum"),
    "weights": lambda output, y: ((output - y) ** 2 * (y.abs() / y.abs().sum())).sum(),
    "hardest": lambda output, y: ((output - y) ** 2).sum(1).topk(2).values.mean(),
    "largest": lambda output, y: ((output - y) ** 2).max(),
    "median": lambda output, y: ((output - y) ** 2).sum(1).median(),
    "sorted": lambda output, y: ((output - y) ** 2).sort(0).values[:2].mean(),
    "other terms": lambda output, y: sum(nn.functional.mse_loss(output, y) for _ in range(1 + dist.get_rank() % 2)),
    "largest of each": lambda output, y: ((output - y) ** 2).max(1).values.mean(),
    "two of each": lambda output, y: ((output - y) ** 2).topk(2).values.mean(),
    "mean": lambda output, y: ((output - y) ** 2).sum() / len(y),
    "times": lambda output, y: ((output - y) ** 2).sum() * (1 / len(y)),
    "even weights": lambda output, y: ((output - y) ** 2 * torch.full_like(y, 1 / y.numel())).sum(),
    "mean of sums": lambda output, y: ((output - y) ** 2).sum(1).mean(),
    "whole batch": lambda output, y: ((output - y) ** 2).sum() / 8,
    "scale": lambda output, y: ((output / output.std().detach() - y) ** 2).mean(),
    "targets": lambda output, y: ((output - (y - y.mean(0)) / y.std(0)) ** 2).mean(),
    "class weights": lambda output, y: nn.functional.cross_entropy(
        output, at(y), (1 / (1 + at(y).bincount())).double()
    ),
    "above median": lambda output, y: output[y > y.median()].square().mean(),
    "root": lambda output, y: (output * (y > 0)).square().sum() / (y > 0).sum().sqrt(),
    "added": lambda output, y: (output * (y > 0)).square().sum() / ((y > 0).sum() + 1),
    "at least 90": lambda output, y: (output * (y > 0)).square().sum() / (y > 0).sum().clamp(min=90),
    "at least 3": lambda output, y: (output * (y > 0)).square().sum() / (y > 0).sum().clamp(min=3),
    "at least 1": lambda output, y: (output * (y > 0)).square().sum() / (y > 0).sum().clamp(min=1),
    "at least 6": lambda output, y: (output * (y > 0)).square().sum() / max(int((y > 0).sum()), 6),
    "count": lambda output, y: (output * (y > 0)).square().sum() / max((y > 0).sum().item(), 1),
    "worst groups": lambda output, y: (means := of_groups(output, y)) @ (9 * means.detach()).softmax(0),
    "groups": lambda output, y: of_groups(output, y) @ torch.tensor([0.3, 0.7]).double(),
    "shares": lambda output, y: of_groups(output, y) @ torch.stack([g.double().mean() for g in groups(y)]),
    "mixed": lambda output, y: ((output - 0.7 * y - 0.3 * y.flip(0)) ** 2).mean(),
    "statistics of all": lambda output, y: ((output / hocket.average(y.square().mean()) - y) ** 2).mean(),
    "noise": lambda output, y: ((output + 0.1 * torch.randn_like(output) - y) ** 2).mean(),
}


def at(y: Tensor) -> Tensor:
    return y.argmax(1)


def groups(y: Tensor) -> list[Tensor]:
    """Two samples of a rank's four in each."""
    return [at(y) == 0, at(y) != 0]


def of_groups(output: Tensor, y: Tensor) -> Tensor:
    return torch.stack([((output - y) ** 2)[group].mean() for group in groups(y)])


def losses() -> dict[str, str]:
    """What the first back-propagation of each loss ends in, or warns of."""
    found = {}
    for name, loss_of in LOSSES.items():
        model, _, loader = hocket.distribute(network(), None, DataLoader(data(), batch_size=8))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            x, y = next(iter(loader))
            penalty = 1e-3 * sum((p**2).sum() for p in model.parameters())
            found[name] = error_of((loss_of(model(x), y) + penalty).backward)
        found[name] += "".join(f"warned: {one.message}" for one in caught if LOST.search(str(one.message)))
    model, _, loader = hocket.distribute(network(), None, DataLoader(data(), batch_size=8))
    x, y = next(iter(loader))
    bags = [one + torch.linspace(0, 1, 7 - i, dtype=one.dtype)[:, None] for i, one in enumerate(x)]  # the last has four
    each = [(model(one).max() - y[i, 0]).square() for i, one in enumerate(bags)]
    found["bags"] = error_of((torch.stack(each).sum() / len(each)).backward)
    return found


def test_a_sum_is_refused_where_means_are_averaged(ranks: list[dict[str, Any]]) -> None:
    """Gradients of a sum were those of one device divided by the number of ranks."""
    for rank, found in enumerate(one["losses"] for one in ranks):
        sums = [name for name, said in found.items() if 'pass hocket.distribute(..., loss_reduction="sum"' in said]
        assert sums == ["sum", "of the function", "autoencoder", "masked", "of classes"]
        assert "adds up to one over this rank's samples" in found["weights"]
        ranked = [name for name, said in found.items() if "the loss ranks the samples" in said]
        assert ranked == ["hardest", "largest", "median", "sorted"]
        mean = ("mean", "times", "even weights", "mean of sums", "largest of each", "two of each", "bags")
        assert [found[name] for name in mean] == [""] * 7
        assert "different numbers of terms" in found["other terms"]
        assert found["whole batch"].startswith("warned: the loss divides by 8") == (rank == 0)
        hidden = [name for name, said in found.items() if "depends on other samples of its batch" in said]
        assert hidden == ["scale", "targets", "class weights", "above median", "worst groups"]
        more = [name for name, said in found.items() if said.startswith("the loss divides by more than it counts")]
        assert more == ["root", "added", "at least 90", "at least 6"]
        assert found["at least 3"].startswith("warned: the loss divides by more than it counts where") == (rank == 0)
        assert ("comes from the same rank's" in found["mixed"]) == (rank == 0)
        right = ("at least 1", "count", "groups", "shares", "statistics of all", "noise")
        assert [found[name] for name in right] == [""] * 6


def gradients() -> list[str]:
    """What torch.autograd.grad ends in: for parameters, for inputs, and for parameters of this rank's samples alone."""
    model, _, loader = hocket.distribute(network(), None, DataLoader(data(), batch_size=8))
    x, _ = next(iter(loader))
    x.requires_grad_()
    found = [error_of(lambda: torch.autograd.grad(model(x).mean(), list(model.parameters())))]
    found.append(error_of(lambda: torch.autograd.grad(model(x).sum(), x)))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.autograd.grad(model(x).mean(), x)
    found += [" ".join(str(one.message) for one in heard)]
    other, _, loader = hocket.distribute(network(), None, DataLoader(data(), batch_size=8))
    x, _ = next(iter(loader))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        (change := torch.zeros_like(x)).requires_grad_()
        other(x + change).sin().mean().backward()
    found += [" ".join(str(one.message) for one in heard)]
    by_sample = torch.func.grad(lambda one, a: loss_with(other.module, one, a[None], a[None, :3]))
    found.append(error_of(lambda: torch.func.vmap(by_sample, (None, 0))(dict(other.module.named_parameters()), x)))
    with model.no_sync():
        found.append(error_of(lambda: torch.autograd.grad(model(x).mean(), list(model.parameters()))))
    penalised, _, loader = hocket.distribute(network(), None, DataLoader(data(), batch_size=8))
    x, _ = next(iter(loader))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        out = penalised(x.requires_grad_())
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.sin().mean() + slope.square().sum(1).mean()).backward()
    return [*found, " ".join(str(one.message) for one in heard)]


def test_gradients_that_nobody_averages_are_refused(ranks: list[dict[str, Any]]) -> None:
    for rank, (parameters, inputs, *by_mean, by_sample, own, penalty) in enumerate(one["gradients"] for one in ranks):
        assert "without averaging them over ranks" in parameters
        assert (inputs, by_sample, own, penalty) == ("", "", "", "")
        for said in by_mean:
            assert ("2 times that of one device, whose mean is over 8" in said) == (rank == 0)


PARTS: dict[str, Callable[[Any, Tensor, Tensor], None]] = {
    "single": lambda model, x, y: [one_loss(model, x[i : i + 1], y[i : i + 1]).backward() for i in range(len(x))],
    "single, of a fixed number": lambda model, x, y: [
        (one_loss(model, x[i : i + 1], y[i : i + 1]) / 8).backward() for i in range(len(x))
    ],
    "single, divided": lambda model, x, y: [
        (one_loss(model, x[i : i + 1], y[i : i + 1]) / len(x)).backward() for i in range(len(x))
    ],
    "pairs": lambda model, x, y: [
        one_loss(model, a, b).backward() for a, b in zip(x.split(2), y.split(2), strict=True)
    ],
    "pairs, divided": lambda model, x, y: [
        (one_loss(model, a, b) / (len(x) / 2)).backward() for a, b in zip(x.split(2), y.split(2), strict=True)
    ],
    "each by itself": lambda model, x, y: by_itself(model, x, y),
    "each by itself on its rank": lambda model, x, y: by_itself(model, x, y, model.no_sync),
    "with updates": lambda model, x, y: updated(model, x, y),
    "first": lambda model, x, y: one_loss(model, x[:1], y[:1]).backward(),
    "whole": lambda model, x, y: one_loss(model, x, y).backward(),
}


def one_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def by_itself(model: Any, x: Tensor, y: Tensor, block: Callable[[], Any] = nullcontext) -> None:
    """Take the gradient of each sample, as to clip it."""
    for a, b in zip(x.split(1), y.split(1), strict=True):
        with block():
            model.zero_grad()
            (one_loss(model, a, b) / len(x)).backward()


def updated(model: Any, x: Tensor, y: Tensor) -> None:
    """Update with each sample."""
    for a, b in zip(x.split(1), y.split(1), strict=True):
        (one_loss(model, a, b) / len(x)).backward()
        model.optimizer.step()
        model.zero_grad()


def in_parts() -> dict[str, str]:
    """What the first batch ends in, or warns of."""
    found = {}
    for name, pass_over in PARTS.items():
        plain = network()
        optimizer = torch.optim.SGD(plain.parameters(), 0.01)
        model, optimizer, loader = hocket.distribute(plain, optimizer, DataLoader(data(), batch_size=8))
        object.__setattr__(model, "optimizer", optimizer)
        x, y = next(iter(loader))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found[name] = error_of(functools.partial(pass_over, model, x, y))
        found[name] += "".join(f"warned: {one.message}" for one in caught if LOST.search(str(one.message)))
    return found


def test_parts_of_a_batch_whose_number_depends_on_its_size_are_told(ranks: list[dict[str, Any]]) -> None:
    for found in (dict(one["parts"]) for one in ranks):
        refused = [name for name, said in found.items() if "sample by sample" in said]
        assert refused == ["single", "single, of a fixed number"]
        assert "add up to 2 times the mean" in found.pop("pairs")
        assert "do it inside `with model.no_sync():`" in found.pop("each by itself")
        assert "updates the model after a part of its batch" in found.pop("with updates")
        assert not any(said for name, said in found.items() if name not in refused)


def minibatches(size: int, choose: Callable[[Tensor], Sequence[Tensor]]) -> str:
    """What is told of a loop that updates with some of its batch, which it chooses by an index."""
    plain = network()
    optimizer: Any = torch.optim.SGD(plain.parameters(), 0.01)
    model, optimizer, loader = hocket.distribute(plain, optimizer, DataLoader(data(), batch_size=size))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for x, y in loader:
                for some in choose(torch.arange(len(x))):
                    optimizer.zero_grad()
                    one_loss(model, x[some], y[some]).backward()
                    optimizer.step()
    return "".join(f"{one.message}" for one in caught)


def chosen() -> list[str]:
    """What is told of parts of one size, also with a smaller last one, of all samples, and of some and the others."""
    ways: list[tuple[int, Callable[[Tensor], Sequence[Tensor]]]] = [
        (8, lambda index: index.roll(1).split(2)),
        (10, lambda index: index.split(2)),
        (8, lambda index: (index, index)),
        (8, lambda index: (index[1:], index[:1])),
    ]
    return [minibatches(*one) for one in ways]


def test_updates_with_parts_that_the_loop_chooses_are_told_of() -> None:
    """One device has more of them in a batch: 2e-2 to 7e-2 off, and silent."""
    said = ["updates the model after a part of its batch" in one for one in run_ranks(chosen, 2)[0]]
    assert said == [True, True, False, False]


def scaled() -> list[list[str]]:
    """The warnings of losses with a factor: of a rank's values, its size, of all ranks' values, fixed."""
    factors = [lambda y: 1 / float(y.std()), len, lambda y: hocket.average(y.square().mean()), lambda y: 0.3]
    found = []
    for factor in factors:
        model, _, loader = hocket.distribute(network(), None, DataLoader(data(), batch_size=8))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for x, y in loader:
                (nn.functional.mse_loss(model(x), y) * factor(y)).backward()
        found.append([str(one.message) for one in caught if "multiplies its mean loss" in str(one.message)])
    return found


def test_a_factor_of_a_rank_s_own_samples_is_told(ranks: list[dict[str, Any]]) -> None:
    for rank, (own, size, *others) in enumerate(one["scaled"] for one in ranks):
        assert ["differs from rank to rank" in one for one in own] == [True] * (rank == 0)
        assert ["how many samples this rank has" in one for one in size] == [True] * (rank == 0)
        assert others == [[], []]


def left_out(least: int, every: int) -> int:
    """How many warnings there are where a loop takes batches of so many samples and more, and of these each n-th."""
    model, _, loader = hocket.distribute(network(), None, DataLoader(data(), batch_size=9))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i, (x, y) in enumerate(itertools.chain(loader, loader)):
            if len(x) >= least and not i % every:
                nn.functional.mse_loss(model(x), y).backward()
    return sum("left out a batch" in str(one.message) for one in caught)


def test_a_batch_that_is_left_out_for_its_size_is_told(ranks: list[dict[str, Any]]) -> None:
    assert [one["left out"] for one in ranks] == [[1, 0, 0]] * 2


def changed() -> list[str]:
    """What forward ends in after a layer was replaced, and batch norm's warnings."""
    model, _, loader = hocket.distribute(network(), None, DataLoader(data(), batch_size=8))
    x, _ = next(iter(loader))
    model(x).mean().backward()
    model.module[2] = nn.Linear(16, 3).double()
    found = [error_of(functools.partial(model, x))]
    for sync in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            normed = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).eval()
            normed, *_ = hocket.distribute(normed, None, None, sync_batch_norm=sync)
            normed.train()(torch.ones(2, 6))
        found.append("".join(str(one.message) for one in caught if "batch norm" in str(one.message)))
    return found


def test_layers_made_after_distribute_are_refused_and_batch_norm_told(ranks: list[dict[str, Any]]) -> None:
    first, other = (one["changed"] for one in ranks)
    assert "no parameter '2.weight' when it was distributed" in first[0]
    assert first[0] == other[0]
    assert first[1].startswith("batch norm (1) normalises by the statistics of a rank's own samples")
    assert [*other[1:], first[2]] == ["", "", ""]


class TimeFirst(nn.Module):
    """A recurrent model whose loader gives samples first, or time."""

    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transposed = transposed
        self.attention = nn.MultiheadAttention(6, 2).double()
        self.recurrent, self.last = nn.LSTM(6, 8).double(), nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.transposed else x
        output = self.last(self.recurrent(self.attention(x, x, x)[0])[0])
        return output.transpose(0, 1) if self.transposed else output


def sequences() -> list[str]:
    found = []
    x = torch.randn(16, 8, 6, generator=torch.Generator().manual_seed(1)).double()
    for transposed in (True, False):
        model = TimeFirst(transposed=transposed)
        model, _, loader = hocket.distribute(model, None, DataLoader(TensorDataset(x, x[..., :3]), batch_size=8))
        for a, b in loader:
            found.append(error_of(nn.functional.mse_loss(model(a), b).backward))
            break
    return found


def test_a_model_that_takes_time_first_is_refused_if_its_batches_have_samples_first(
    ranks: list[dict[str, Any]],
) -> None:
    """Ranks would have parts of the time of all samples."""
    for right, wrong in (one["sequences"] for one in ranks):
        assert right == ""
        assert "take the batch as the second dimension" in wrong


def two_models() -> list[float]:
    """Losses of two models that are trained by turns; each loss goes through both."""
    first, second = network(), network()
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (first, second)]
    first, optimizers[0], loader = hocket.distribute(first, optimizers[0], DataLoader(data(), batch_size=8))
    others = [hocket.distribute(network())[0] for _ in range(6)]  # whose places in memory differ from rank to rank
    junk = [bytearray(1000 * (1 + dist.get_rank())) for _ in range(50)]
    second, optimizers[1], _ = hocket.distribute(second, optimizers[1], None)
    found = []
    for x, y in loader:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(first(x), y) + nn.functional.mse_loss(second(x), y)
        for other in others:
            loss = loss + 0 * other(x).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        found.append(hocket.average(loss.item()))
    assert junk
    return found


def test_models_in_one_loss_are_reduced_in_the_same_order_by_all_ranks(ranks: list[dict[str, Any]]) -> None:
    first, other = (one["two models"] for one in ranks)
    assert first == other


def by_hand() -> list[Any]:
    """What steps end in whose gradients the program has put into `.grad`, or added up on a rank; weights of one."""
    found: list[Any] = []
    gradient = torch.func.grad(functools.partial(loss_with, network()))
    for way in ("own", "averaged", "no_sync"):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(data(), batch_size=10))

        def run(way: str = way, model: Any = model, optimizer: Any = optimizer, loader: Any = loader) -> None:
            for x, y in loader:
                if way == "no_sync":
                    with model.no_sync():
                        nn.functional.mse_loss(model(x), y).backward()
                else:
                    for name, one in gradient(dict(model.module.named_parameters()), x, y).items():
                        own = one.detach()
                        model.get_parameter(name).grad = hocket.average(own) if way == "averaged" else own
                optimizer.step()

        found += [error_of(run), [p.detach().sum().item() for p in model.parameters()]]
    return found


def loss_with(model: nn.Module, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)


def test_a_step_with_gradients_that_nobody_averaged_is_refused(ranks: list[dict[str, Any]]) -> None:
    """Per-sample gradients, or those of an inner loop: each rank trained by itself, without a word."""
    alone = network()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for x, y in DataLoader(data(), batch_size=10):  # the last is of eight
        optimizer.zero_grad()
        one_loss(alone, x, y).backward()
        optimizer.step()
    for own, _, averaged, weights, held_back, _ in (one["by hand"] for one in ranks):
        assert "that no backward() of the model has averaged" in own
        assert "hocket.average(parameter.grad)" in held_back
        assert averaged == ""
        assert weights == pytest.approx([p.detach().sum().item() for p in alone.parameters()], rel=1e-9)


def sampled() -> list[str]:
    """What a sampler ends in whose weights are losses: of a rank's own samples, and of all ranks'."""
    found = []
    for own in (True, False):
        losses = torch.ones(SAMPLES, dtype=torch.float64)
        sampler = WeightedRandomSampler(losses, SAMPLES, generator=torch.Generator().manual_seed(0))
        x, y = data().tensors
        made = DataLoader(TensorDataset(x, y, torch.arange(SAMPLES)), batch_size=8, sampler=sampler)
        model, _, loader = hocket.distribute(network(), None, made)

        def run(own: bool = own, model: Any = model, loader: Any = loader, sampler: Any = sampler) -> None:
            for _ in range(2):
                seen = torch.zeros(SAMPLES, dtype=torch.float64)
                for x, y, at in loader:
                    loss = ((model(x) - y) ** 2).mean(1)
                    loss.mean().backward()
                    seen[at] += 10 * loss.detach()
                sampler.weights += seen if own else hocket.total(seen)

        found.append(error_of(run))
    return found


def out_of_step() -> list[str]:
    """What a loop ends in that leaves out a back-propagation on rank 1, or makes one more."""
    found = []
    for more in (0, 2):
        model, _, loader = hocket.distribute(network(), None, DataLoader(data(), batch_size=4))

        def run(more: int = more, model: Any = model, loader: Any = loader) -> None:
            for i, (x, y) in enumerate(loader):
                for _ in range(more if i == 1 and torch.distributed.get_rank() == 1 else 1):
                    ((model(x) - y) ** 2).mean().backward()

        found.append(error_of(run))
    return found


def test_ranks_that_make_unlike_numbers_of_back_propagations_are_told_so(ranks: list[dict[str, Any]]) -> None:
    """They heard that a sampler had gone by what a rank alone has seen."""
    for left_out, twice in (one["out of step"] for one in ranks):
        assert left_out.startswith("rank 1 back-propagates batch 3 of a pass of the loader while rank 0")
        assert twice.startswith("rank 1 back-propagates batch 2 of a pass of the loader while rank 0")


def test_a_sampler_that_goes_by_a_rank_s_own_losses_is_refused(ranks: list[dict[str, Any]]) -> None:
    """Ranks took parts of different batches: some samples twice, others never."""
    first, other = (one["sampled"] for one in ranks)
    assert first == other
    assert first[0].startswith("rank 1 has taken its samples from another batch than rank 0 (of ")
    assert first[1] == ""
