"""Counts of a batch by which a loss may divide."""

from __future__ import annotations

import math

import torch

from hocket.parallel.batches import AgreedCount, possible_counts


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
    batch = {"a": torch.tensor([[1, 0], [2, 0]]), "b": torch.tensor([[0, 3], [0, 4]])}
    count = AgreedCount.of([one for one in possible_counts(batch, 2) if one(batch) == 2])
    assert count(batch) == 2
    assert math.isnan(count(batch | {"b": torch.ones(2, 2, dtype=torch.int64)}))
