"""Batches of keywords, and losses that the model computes itself, under every plan."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.planner import Plan
from hocket.testing import run_ranks

Tensor = torch.Tensor
PLANS = (
    Plan(),
    Plan(shard="optimizer"),
    Plan(shard="parameters"),
    Plan(tensor_parallel_degree=2),
    Plan(pipeline_parallel_degree=2, micro_batches=2),
    Plan(pipeline_parallel_degree=2, micro_batches=4, pipeline_schedule="gpipe"),
)


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor | None = None


class Classifier(nn.Module):
    """Takes its inputs by keyword, some of them optional, and computes its loss if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 16)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(4)])
        self.head = nn.Linear(16, 5)

    def forward(self, words: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Answer:
        x = self.table(words)
        for layer in self.layers:
            x = x + layer(x)
        if mask is not None:
            x = x * mask[..., None]
        logits = self.head(x.sum(1))
        return Answer(logits, None if labels is None else F.cross_entropy(logits, labels))


def data() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    words, labels = torch.randint(0, 17, (22, 6), generator=g), torch.randint(0, 5, (22,), generator=g)
    return {"labels": labels, "words": words, "mask": (torch.rand(22, 6, generator=g) > 0.2).double()}


def collated(rows: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    return {name: torch.stack(column) for name, column in zip(data(), zip(*rows, strict=True), strict=True)}


def outside(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.logits, batch["classes"])


def batches(own: bool) -> Any:
    """With the loss in the model, or one that wants an entry which is not the model's."""
    rows = TensorDataset(*data().values())
    if own:
        return DataLoader(rows, batch_size=8, collate_fn=collated)
    return DataLoader(rows, batch_size=8, collate_fn=renamed)


def renamed(rows: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    return {"classes" if name == "labels" else name: value for name, value in collated(rows).items()}


def made() -> nn.Module:
    torch.manual_seed(0)
    return Classifier().double()


def train(plan: Plan, own: bool) -> list[float]:
    model = made()
    loader = batches(own)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = hocket.Trainer(model, None if own else outside, optimizer, plan, sample=next(iter(loader)))
    losses = [float(trainer.step(batch)) for _ in range(2) for batch in trainer.batches(loader)]
    return [*losses, trainer.evaluate(loader)]


def train_all() -> list[list[float]]:
    return [train(plan, own) for plan in PLANS for own in (True, False)]


@pytest.mark.long
def test_every_plan_passes_a_batch_as_keywords_and_takes_the_models_own_loss() -> None:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = []
    for _ in range(2):
        for batch in batches(own=True):
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            plain.append(float(loss.detach()))
    for found in run_ranks(train_all, 2, timeout_s=110):
        for number, losses in enumerate(found):
            assert losses[:-1] == pytest.approx(plain, rel=1e-9), PLANS[number // 2]
            assert losses[-1] == pytest.approx(found[0][-1], rel=1e-9)


def test_entries_and_outputs_that_cannot_be_meant_are_refused() -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hocket.Trainer(model, None, optimizer)
    batch = data()
    with pytest.raises(TypeError, match="has 'extra', which the model's forward does not take: it takes labels, mask,"):
        trainer.step({**batch, "extra": batch["words"]})
    with pytest.raises(TypeError, match="scalar `loss`; it is Answer with NoneType for a loss. Give the model"):
        trainer.step({"words": batch["words"]})
    linear = nn.Linear(3, 3)
    with pytest.raises(TypeError, match="it is Tensor with Tensor for a loss"):
        hocket.Trainer(linear, None, torch.optim.SGD(linear.parameters(), lr=0.1)).step([torch.ones(4, 3)])


class OneByOne(nn.Module):
    """Goes through its samples, as models of pictures of several sizes do, and leaves some labels out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Answer:
        logits = self.head(torch.stack([self.body(row) for row in x]).tanh())
        return Answer(logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def evaluated() -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    model = OneByOne().double()
    labels = torch.tensor([[1, 2, 3], [4, 0, 1], [-100, -100, 2], [-100, 3, -100]])
    batch = {"x": torch.randn(4, 3, 6, dtype=torch.float64), "labels": labels}
    plain = float(model(**batch).loss)
    plan = Plan(pipeline_parallel_degree=2, micro_batches=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = hocket.Trainer(model, None, torch.optim.SGD(model.parameters(), lr=0.1), plan, sample=batch)
        losses = [plain, trainer.evaluate([batch]), float(trainer.step(batch))]
    return losses, [str(one.message) for one in caught]


def test_stages_that_take_no_other_size_evaluate_a_mean_over_tokens_and_say_that_the_loss_was_not_compared() -> None:
    found = run_ranks(evaluated, 2, timeout_s=110)
    for (plain, *others), _ in found:
        assert others == pytest.approx([plain, plain], rel=1e-12)
    assert any("could not be compared" in line for line in found[0][1])
