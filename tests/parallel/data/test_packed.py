"""Samples that a `collate_fn` packs into one row: a model that keeps them apart trains as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hocket
from hocket.testing import run_ranks


class Attention(nn.Module):
    """Causal attention over a row of tokens, which may meet across samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.out = nn.Embedding(20, 8).double(), nn.Linear(8, 20).double()

    def forward(self, tokens: Tensor, places: Tensor, sample: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + 0.1 * places[..., None]
        n = tokens.shape[-1]
        meet = torch.arange(n)[:, None] >= torch.arange(n)
        if sample is not None:
            meet = meet & (sample[..., :, None] == sample[..., None, :])
        return self.out(F.scaled_dot_product_attention(x, x, x, attn_mask=meet))


def texts() -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(0, 20, (3 + 5 * i % 6,), generator=random) for i in range(24)]


def packed(some: list[Tensor], *, flat: bool = False) -> tuple[Tensor, ...]:
    rows = (
        torch.cat(some),
        torch.cat([torch.arange(len(one)) for one in some]),
        torch.cat([torch.full((len(one),), i) for i, one in enumerate(some)]),
    )
    return rows if flat else tuple(one[None] for one in rows)


def flat(some: list[Tensor]) -> tuple[Tensor, ...]:
    return packed(some, flat=True)


def train(batch: int, apart: bool, collate: Any) -> list[float] | str:
    model: Any = Attention()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(texts(), batch, collate_fn=collate))
    losses = []
    try:
        for tokens, places, sample in loader:
            optimizer.zero_grad()
            output = model(tokens, places, sample if apart else None)
            loss = F.cross_entropy(output.flatten(0, -2), (tokens.flatten() + places.flatten()) % 20)
            loss.backward()
            optimizer.step()
            losses.append(float(hocket.average(loss.detach())))
    except RuntimeError as error:
        return str(error)
    return losses


@pytest.mark.sampled(1)
@pytest.mark.parametrize("collate", [packed, flat])
@pytest.mark.parametrize("batch", [2, 3, 8])  # of two or three, a rank has one
def test_samples_of_a_row_that_the_model_keeps_apart_are_trained_as_by_one_process(batch: int, collate: Any) -> None:
    (alone,) = run_ranks(train, 1, batch, True, collate, timeout_s=120)
    for found in run_ranks(train, 2, batch, True, collate, timeout_s=120):
        assert found == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("collate", [packed, flat])
@pytest.mark.parametrize("batch", [2, 8])
def test_samples_that_meet_in_their_row_are_refused(batch: int, collate: Any) -> None:
    for found in run_ranks(train, 2, batch, False, collate, timeout_s=120):
        assert isinstance(found, str)
        assert "packs samples into one row" in found
        assert "off, relative" in found
