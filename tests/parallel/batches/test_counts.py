"""Counts of a batch by which a loss may divide."""

from __future__ import annotations

import math

import pytest
import torch

import hocket
from hocket.parallel.batches import AgreedCount, BatchShard, batch, possible_counts


def padded(*texts: list[int]) -> dict[str, torch.Tensor]:
    """Tokens padded with 0, which is a token, too; labels with -100."""
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def test_a_token_that_padding_has_too_is_counted() -> None:
    first, later = padded([5, 6, 7], [8, 9]), padded([5, 0, 7], [8, 9])
    matching = [one for one in possible_counts(first, 2) if one(first) == 3 and one.shifted]
    assert {one.path[0] for one in matching} == {"input_ids", "attention_mask", "labels"}
    count = AgreedCount.of(matching)
    assert (count(first), count(later)) == (3, 3)
    other = later | {"attention_mask": torch.ones(2, 3)}  # a mask that says something else is a reason to ask
    assert math.isnan(count(other))


def test_counts_that_nothing_tells_apart_must_agree() -> None:
    tokens = {"a": torch.tensor([[1, 0], [2, 0]]), "b": torch.tensor([[0, 3], [0, 4]])}
    count = AgreedCount.of([one for one in possible_counts(tokens, 2) if one(tokens) == 2])
    assert count(tokens) == 2
    assert math.isnan(count(tokens | {"b": torch.ones(2, 2, dtype=torch.int64)}))


def test_totals_of_a_batch_in_which_a_rank_has_no_sample_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample that the rank has instead counts for nothing, but `len(y)` has it."""
    monkeypatch.setattr(batch, "_now", batch._InUse())
    loader, evaluation = object(), object()
    batch.enter(loader, BatchShard.of(2, 3, 2), torch.ones(1))
    with pytest.raises(RuntimeError, match="of 2, has no sample for some of 3 ranks: .* drop_last=True"):
        hocket.total(1)
    batch.leave(loader)
    with pytest.raises(RuntimeError, match="of 2, has no sample for some of 3 ranks"):  # sums of the epoch
        hocket.total(1)
    batch.enter(evaluation, None, torch.ones(1))
    batch.leave(evaluation)
    assert hocket.total(1) == 1
