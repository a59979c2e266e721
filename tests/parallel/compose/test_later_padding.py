"""Padding that comes in a later batch, or where no rank has samples of unlike lengths, and losses that count it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks

from ...asked import asked

Sample = tuple[Tensor, Tensor]

LENGTHS = {
    "later": [5] * 4 + [3, 7, 8, 4, 5, 6, 7, 8, 3, 3, 4, 9, 5, 5, 6, 2],
    "first": [3, 7, 5, 8, 3, 7, 8, 4, 5, 6, 7, 8, 3, 3, 4, 9],
    "bucketed": [5] * 4 + [7] * 4 + [4] * 4 + [9] * 4 + [3] * 4,  # alike in each batch
}


def samples(lengths: str) -> list[Sample]:
    random = torch.Generator().manual_seed(1)
    rows = (torch.randn(n, 3, generator=random, dtype=torch.float64) for n in LENGTHS[lengths])
    return [(x, x.mean()) for x in rows]


def padded(rows: list[Sample]) -> Sample:
    return nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True), torch.stack([y for _, y in rows])


def from_the_left(rows: list[Sample]) -> Sample:
    x, y = padded([(x.flip(0), y) for x, y in rows])
    return x.flip(1), y


def longest_first(rows: list[Sample]) -> Sample:
    return padded(sorted(rows, key=lambda row: -len(row[0])))


def of_one_length(rows: list[Sample]) -> Sample:
    x, y = padded(rows)
    return F.pad(x, (0, 0, 0, 10 - x.shape[1])), y


def with_classes(rows: list[Sample]) -> Sample:
    x, _ = padded(rows)
    return x, (x.sum(-1) > 0).long().masked_fill((x == 0).all(-1), -100)


class Network(nn.Module):
    """A number, or several, for each sample or each of its rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner, self.scores = kind, nn.Linear(3, 4), nn.Linear(4, 10)
        self.recurrent = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        is_row = (x != 0).any(-1, keepdim=True)
        if self.kind == "recurrent":
            return self.scores(self.recurrent(x)[1][0])
        if self.kind == "packed":
            sizes = is_row.sum(1)[:, 0]
            some = nn.utils.rnn.pack_padded_sequence(x, sizes, batch_first=True, enforce_sorted=False)
            return self.scores(self.recurrent(some)[1][0])
        hidden = torch.tanh(self.inner(x))
        return self.scores(hidden if self.kind == "rows" else (hidden * is_row).sum(1) / is_row.sum(1))


def error(output: Tensor, target: Tensor) -> Tensor:
    """A mean over all that the model gives."""
    return (output - target.view(-1, *[1] * (output.dim() - 1))).square().mean()


def classes(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


CASES: dict[str, tuple[str, Any, str, Any, dict[str, Any]]] = {
    "a recurrent layer": ("recurrent", error, "later", padded, {}),
    "one sample a rank": ("recurrent", error, "later", padded, {"batch": 2}),
    "workers": ("recurrent", error, "later", padded, {"workers": 2}),
    "before the samples": ("recurrent", error, "later", from_the_left, {}),
    "sorted samples": ("recurrent", error, "later", longest_first, {}),
    "a weight": ("recurrent", error, "later", padded, {"loss_weight": len}),
    "a sum": ("recurrent", error, "later", padded, {"loss_reduction": "sum"}),
    "a mean over padding": ("rows", error, "later", padded, {}),
    "a mean over padding at once": ("rows", error, "first", padded, {}),
}
RIGHT: dict[str, tuple[str, Any, str, Any, dict[str, Any]]] = {
    "masked": ("masked", error, "later", padded, {}),
    "masked at once": ("masked", error, "first", padded, {}),
    "masked, one sample a rank": ("masked", error, "later", padded, {"batch": 2}),
    "masked, with workers": ("masked", error, "later", padded, {"workers": 2}),
    "masked before": ("masked", error, "first", from_the_left, {}),
    "masked, a sum": ("masked", error, "later", padded, {"loss_reduction": "sum"}),
    "masked, a weight": ("masked", error, "later", padded, {"loss_weight": len}),
    "packed": ("packed", error, "later", padded, {}),
    "packed and sorted": ("packed", error, "first", longest_first, {}),
    "one length": ("recurrent", error, "later", of_one_length, {}),
    "one length in each batch": ("recurrent", error, "bucketed", padded, {}),
    "rows of one length in each batch": ("rows", error, "bucketed", padded, {}),
    "labels that are ignored": ("rows", classes, "later", with_classes, {}),
}


def steps(case: Any, how: str) -> tuple[list[float], str]:
    """The losses of a loop of its own, alone or under `hocket.distribute`, or of a Trainer; and what was refused."""
    kind, loss_fn, lengths, collate, settings = case
    torch.manual_seed(0)
    model: Any = Network(kind).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    workers = settings.get("workers", 0) if how != "alone" else 0
    context = "fork" if workers else None
    size = settings.get("batch", 4)
    loader: Any = DataLoader(
        samples(lengths), size, False, None, None, workers, collate, multiprocessing_context=context
    )
    summed = settings.get("loss_reduction") == "sum"
    report: Callable[[Tensor], Any] = (
        (lambda loss: loss) if how == "alone" else hocket.total if summed else hocket.average
    )
    losses: list[float] = []
    try:
        if how == "trainer":
            sample = (torch.ones(4, 9, 3, dtype=torch.float64),)
            trainer = hocket.Trainer(model, loss_fn, optimizer, Plan(), sample=sample)
            for batch in trainer.batches(loader):
                losses.append(float(trainer.step(batch)))
            return losses, ""
        if how == "distribute":
            weight = (lambda batch: settings["loss_weight"](batch[1])) if "loss_weight" in settings else None
            reduction: Any = "sum" if summed else "mean"
            model, optimizer, loader = hocket.distribute(
                model, optimizer, loader, loss_weight=weight, loss_reduction=reduction
            )
        for x, y in loader:
            loss = loss_fn(model(x), y) * (len(y) if summed else 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(report(loss.detach())))
    except (RuntimeError, ValueError) as refusal:
        return losses, str(refusal)
    return losses, ""


def run_all(cases: list[tuple[str, str]]) -> dict[tuple[str, str], tuple[list[float], str]]:
    return {(name, how): steps({**CASES, **RIGHT}[name], how) for name, how in cases}


def _ways(case: Any) -> list[str]:
    return ["distribute", "trainer"] if not {"loss_weight", "loss_reduction"} & {*case[-1]} else ["distribute"]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Any:
    return run_ranks(run_all, 2, asked(request, "name", "how"), timeout_s=120)


@pytest.mark.long
@pytest.mark.parametrize(("name", "how"), [(name, how) for name, case in CASES.items() for how in _ways(case)])
def test_padding_that_changes_losses_is_refused_when_it_comes(found: Any, name: str, how: str) -> None:
    for losses, said in (one[name, how] for one in found):
        assert "pads samples to the longest of them" in said
        assert len(losses) < 4


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "how"), [(name, how) for name, case in RIGHT.items() for how in _ways(case)])
def test_padding_that_changes_nothing_is_exact(found: Any, name: str, how: str) -> None:
    expected, _ = steps(RIGHT[name], "alone")
    for losses, said in (one[name, how] for one in found):
        assert said == ""
        assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(losses, expected, strict=True))
