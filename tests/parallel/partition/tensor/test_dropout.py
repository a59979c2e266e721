"""Dropout: other numbers on every rank where tensors are cut, the same ones where they are whole."""

from __future__ import annotations

import functools
from typing import Any

from hocket.testing import run_ranks

from . import tensor_programs as programs


@functools.cache
def dropped() -> list[dict[str, Any]]:
    return run_ranks(programs.dropping, 2, timeout_s=120)


def test_whole_tensors_lose_the_same_elements_on_all_ranks() -> None:
    a, b = (rank["masks"]["before"] for rank in dropped())
    assert a == b
    assert any(x for row in a for token in row for x in token)


def test_parts_lose_other_elements_on_every_rank() -> None:
    a, b = (rank["masks"]["inside"] for rank in dropped())
    differing = sum(
        x != y for r, s in zip(a, b, strict=True) for t, u in zip(r, s, strict=True) for x, y in zip(t, u, strict=True)
    )
    assert 0.3 < differing / (2 * 6 * 16) < 0.7


def test_ranks_agree_on_results_and_stay_in_step() -> None:
    a, b = (rank["recompute=False"] for rank in dropped())
    assert a["out"] == b["out"]
    assert a["next"] == b["next"]


def test_checkpointing_drops_the_same_elements_again() -> None:
    for rank in dropped():
        assert rank["recompute=True"] == rank["recompute=False"]


def test_evaluation_drops_nothing() -> None:
    assert dropped()[0]["evaluation"] == 0.0


def test_attention_to_one_tensor_twice_is_told_from_attention_to_two() -> None:
    for apart, flows in run_ranks(programs.keys_as_values, 2):
        assert apart < 1e-9
        assert flows
