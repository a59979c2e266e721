"""Training programs with embedding tables, run by ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.parallel.embedding import EmbeddingParallel, distribute_embeddings
from hocket.parallel.mesh import world as _world
from hocket.profile import Recorder
from hocket.workloads import example

SAMPLES = 26
BATCH = 8  # the last of four has two samples
EPOCHS = 3
WORDS, PADDING = 37, 3
HOWS: tuple[Any, ...] = ("table", "row", "hybrid")


class Lookups(nn.Module):
    """Every way to look something up that torch has."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.people = nn.Embedding(19, 4, sparse=sparse)
        self.words = nn.Embedding(WORDS, 4, padding_idx=PADDING, sparse=sparse)
        self.sums = nn.EmbeddingBag(WORDS, 4, mode="sum", padding_idx=PADDING, sparse=sparse)
        self.means = nn.EmbeddingBag(WORDS, 4, mode="mean", padding_idx=PADDING, sparse=sparse)
        self.flat = nn.EmbeddingBag(WORDS, 4, mode="mean", sparse=sparse)
        self.few = nn.Embedding(3, 4)  # fewer rows than four ranks
        self.importance = nn.Parameter(torch.rand(WORDS))
        self.mix = nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, person: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(0, text.numel(), text.shape[1], device=text.device)
        found = [
            self.people(person),
            self.words(text).mean(1),
            self.sums(text, per_sample_weights=self.importance[text]),
            self.means(text),
            self.flat(text.flatten(), rows),
            self.few(person % 3),
        ]
        score: torch.Tensor = self.mix(torch.cat(found, dim=1))
        return score.squeeze(1)


def setting(sparse: bool) -> tuple[Lookups, TensorDataset]:
    torch.manual_seed(11)
    model = Lookups(sparse).double()
    text = torch.randint(0, WORDS, (SAMPLES, 5))
    text[4] = PADDING  # a bag with nothing in it
    text[:, 4] = PADDING
    return model, TensorDataset(torch.randint(0, 19, (SAMPLES,)), text, torch.randn(SAMPLES).double())


class Both:
    """Two optimizers as one: for rows that were looked up, and for the rest."""

    def __init__(self, model: Lookups) -> None:
        sparse = [m.weight for m in (model.people, model.words, model.sums, model.means, model.flat)]
        mine = {id(p) for p in sparse}
        self.parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.SparseAdam(sparse, lr=0.01),
            torch.optim.Adam([p for p in model.parameters() if id(p) not in mine], lr=0.01),
        )

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()


OPTIMIZERS: dict[str, tuple[bool, Callable[[Lookups], Any]]] = {
    "sgd": (False, lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)),
    "adam": (False, lambda m: torch.optim.Adam(m.parameters(), lr=0.01)),
    "sparse sgd": (True, lambda m: torch.optim.SGD(m.parameters(), lr=0.05)),
    "sparse adam": (True, Both),
}


CASES = (
    ("sgd", "row"),
    ("adam", "table"),
    ("adam", "hybrid"),
    ("sparse sgd", "table"),
    ("sparse adam", "row"),
    ("sparse adam", "hybrid"),
)


def losses_of(model: Any, optimizer: Any, loader: Any) -> Iterator[torch.Tensor]:
    for _ in range(EPOCHS):
        for *inputs, target in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(*inputs), target)
            loss.backward()
            optimizer.step()
            yield loss


def plain(optimizer_name: str) -> tuple[list[float], dict[str, Any]]:
    """The curve and the weights of one process."""
    sparse, make = OPTIMIZERS[optimizer_name]
    model, data = setting(sparse)
    losses = [loss.item() for loss in losses_of(model, make(model), DataLoader(data, batch_size=BATCH))]
    return losses, {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}


def divided(optimizer_name: str, how: Any) -> tuple[list[float], dict[str, Any]]:
    """The same, with tables divided behind an optimizer that was made before."""
    sparse, make = OPTIMIZERS[optimizer_name]
    model, data = setting(sparse)
    world = _world.current()
    if world.rank:  # rank 0's weights count
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    optimizer = make(model)
    form = distribute_embeddings(model, world, how, replicate_below=200)
    parallel, _, loader = hocket.distribute(model, None, DataLoader(data, batch_size=BATCH))
    losses = [hocket.average(loss).item() for loss in losses_of(parallel, optimizer, loader)]
    return losses, whole(model, form)


def whole(model: nn.Module, form: EmbeddingParallel) -> dict[str, Any]:
    return {
        name: (form.whole(name) if name in form.shards else parameter).detach().numpy().copy()
        for name, parameter in model.named_parameters()
    }


def all_cases() -> dict[tuple[str, str], Any]:
    torch.set_num_threads(1)
    return {case: divided(*case) for case in CASES}


def gradients(reduction: Any, passes: int) -> dict[str, Any]:
    """Gradients that add up over the first batches of a loader, of all parameters in full."""
    model, data = setting(False)
    form = distribute_embeddings(model, _world.current(), "row")
    loader = DataLoader(data, batch_size=BATCH - 1)
    parallel, _, loader = hocket.distribute(model, None, loader, loss_reduction=reduction)
    for i, (*inputs, target) in enumerate(loader):
        if i == passes:
            break
        with parallel.no_sync() if i < passes - 1 else nullcontext():
            F.mse_loss(parallel(*inputs), target, reduction=reduction).backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad
        if name in form.shards:
            shape, (begin, _) = form.shards[name]
            full = parameter.detach().new_zeros(shape)
            full[begin : begin + len(parameter)] = parameter.grad
            found[name] = hocket.total(full)
    return {name: gradient.numpy().copy() for name, gradient in found.items()}


def both_gradients() -> list[dict[str, Any]]:
    return [gradients("sum", 1), gradients("mean", 2)]


def recommender(how: Any, steps: int) -> list[float]:
    """Losses of the bundled recommender's small size, evaluated in between; None for `how`: undivided."""
    found = example("recommender", batch_size=10)
    optimizer = found.optimizer(found.model)
    model: Any = found.model
    batches: Any = found.batches(steps)
    if how is not None:
        distribute_embeddings(found.model, _world.current(), how, replicate_below=500)
        model, _, batches = hocket.distribute(model, None, batches)
    losses = []
    for *inputs, target in batches:
        optimizer.zero_grad()
        loss = found.loss_fn(model(*inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item() if how is None else hocket.average(loss).item())
    return losses


def recommenders(steps: int) -> list[list[float]]:
    return [recommender(how, steps) for how in HOWS]


def counted(how: Any) -> tuple[tuple[int, int], tuple[int, int], str]:
    """All-to-alls of a step as they were recorded and as they were expected: how many, and bytes of all ranks."""
    world = _world.current()
    model, data = setting(False)
    form = distribute_embeddings(model, world, how, replicate_below=200)
    batch = 6
    person, text, target = (part[world.rank * batch :][:batch] for part in data.tensors)
    with Recorder() as recorder:
        F.mse_loss(model(person, text), target).backward()
    rows = [row for row in recorder.histogram() if row.kind == "all_to_all"]
    mine = sum(row.count for row in rows), int(hocket.total(float(sum(row.nbytes for row in rows))))
    padding = int(hocket.total(float((text == PADDING).sum())))
    ids = {"people.weight": batch * world.size, "few.weight": batch * world.size}
    ids |= {f"{name}.weight": text.numel() * world.size for name in ("words", "sums", "means", "flat")}
    ids["sums.weight"] -= padding
    ids["means.weight"] -= padding
    expected = form.collectives({name: count for name, count in ids.items() if name in form.shards})
    return mine, (sum(c.count for c in expected), sum(c.nbytes for c in expected)), str(form)


def counts() -> list[Any]:
    return [counted(how) for how in HOWS]


def parts() -> list[dict[str, Any]]:
    """What this rank holds of each divided table: shape of the whole, first row, and rows."""
    model, _ = setting(False)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    form = distribute_embeddings(model, _world.current(), "hybrid", replicate_below=0)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert all(model.get_parameter(name) is parameter for name, parameter in form.parameters.items())
    full, _ = setting(False)
    for name, parameter in form.parameters.items():
        assert torch.equal(form.part(name, full.get_parameter(name)), parameter)
    again = distribute_embeddings(model, _world.current(), "row")
    assert not again.shards
    assert set(again.refused.values()) == {"it is divided already"}
    return [
        {"name": name, "shape": shape, "begin": offsets[0], "rows": form.parameters[name].detach().numpy().copy()}
        for name, (shape, offsets) in form.shards.items()
    ]


class Awkward(nn.Module):
    """Tables that cannot be divided, and one that can."""

    class Own(nn.Embedding):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.own = Awkward.Own(8, 2)
        self.renormed = nn.Embedding(8, 2, max_norm=1.0)
        self.tied = nn.Embedding(8, 2)
        self.out = nn.Linear(2, 8, bias=False)
        self.out.weight = self.tied.weight
        self.frequent = nn.EmbeddingBag(8, 2, scale_grad_by_freq=True)
        self.good = nn.EmbeddingBag(8, 2)
        self.same = self.good

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.tied(ids).mean(1) + self.good(ids) + self.same(ids))
        return result


def refusals() -> tuple[dict[str, str], list[str], list[str]]:
    """Reasons, what was divided, and messages of look-ups that make no sense."""
    model = Awkward()
    form = distribute_embeddings(model, _world.current(), "row")
    messages = []
    for look_up in (
        lambda: model.good(torch.tensor([[1, 8]])),
        lambda: model.good(torch.tensor([[1, -2]])),
        lambda: model.good(torch.tensor([1, 2])),
        lambda: model.good(torch.tensor([[1, 2]]), torch.tensor([0])),
        lambda: model.good(torch.tensor([[1, 2]]), None, torch.ones(2)),
    ):
        try:
            look_up()
        except (ValueError, IndexError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return form.refused, list(form.shards), messages


def edges() -> list[bool]:
    """Look-ups of nothing, of a frozen table, and of a table with fewer rows than ranks; results as torch's."""
    world, passed = _world.current(), []
    for sparse in (False, True):
        torch.manual_seed(3)
        table, bag = nn.Embedding(2, 3, sparse=sparse), nn.EmbeddingBag(5, 3, mode="max")
        frozen = nn.Embedding(6, 3).requires_grad_(False)
        plain = copy.deepcopy([table, bag, frozen])
        model = nn.ModuleList([table, bag, frozen])
        distribute_embeddings(model, world, "row")
        nobody = torch.zeros((0, 4), dtype=torch.int64)
        passed.append(table(nobody).shape == (0, 4, 3))
        passed.append(bag(nobody).shape == (0, 3))
        ids = torch.tensor([[0, 1, 1]], dtype=torch.int32) if world.rank else nobody[:, :3]
        for mine, theirs in zip((table, bag, frozen), plain, strict=True):
            result = mine(ids)
            passed.append(torch.equal(result, theirs(ids)))
            if result.requires_grad:
                result.sum().backward()
        copied = copy.deepcopy(table)
        passed.append(torch.equal(copied(ids), plain[0](ids)))
        gradient = table.weight.grad
        total = hocket.total(float(0.0 if gradient is None else gradient.to_dense().sum()))
        passed.append(abs(total - 9 * (world.size - 1) / world.size) < 1e-6)
        passed.append(frozen.weight.grad is None)
        ends = torch.tensor([0, 2, 2, 3])
        offset = nn.EmbeddingBag(5, 3, mode="mean", include_last_offset=True, sparse=sparse)
        expected = offset(torch.tensor([4, 0, 1]), ends)
        distribute_embeddings(offset, world, "table")
        passed.append(torch.equal(offset(torch.tensor([4, 0, 1]), ends), expected))
    often = nn.Embedding(4, 2, scale_grad_by_freq=True)
    distribute_embeddings(often, world, "table")
    often(torch.tensor([1, 1, 3])).sum().backward()
    assert often.weight.grad is not None
    # A row counts once, however often all ranks together look it up; and gradients are averaged over ranks.
    passed.append(hocket.total(float(often.weight.grad.sum())) == pytest.approx(4 / world.size))
    return passed
