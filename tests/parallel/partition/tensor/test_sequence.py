"""Sequence parallelism: norms, dropout and sums between cut layers work on parts of the sequence."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hocket.testing import run_ranks

from . import tensor_programs as programs


@functools.cache
def trained(n: int) -> list[dict[str, Any]]:
    return run_ranks(programs.in_sequence if n == 2 else programs.gpt_in_sequence, n, timeout_s=150)


@pytest.mark.parametrize(
    ("n", "name"), [(2, "gpt"), (2, "seq2seq"), (2, "mixer"), pytest.param(4, "gpt", marks=pytest.mark.long)]
)
def test_gradients_and_steps_are_those_of_the_plain_model(n: int, name: str) -> None:
    for rank in trained(n):
        found = rank[name]
        assert max(abs(a - b) for a, b in found["losses"]) < 1e-9
        assert found["gradients"] < 1e-9
        assert found["weights"] < 1e-8
        assert found["evaluation"] < 1e-8
        assert found["counted"] == found["expected"]


def test_norms_are_within_it_and_every_all_reduce_of_activations_became_two_halves() -> None:
    found = trained(2)[0]["gpt"]
    assert all(found["forms"][n] == "summed" for n in ("h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"))
    assert found["counted"]["reduce_scatter"][0] == 10
    # What is still reduced by all_reduce are gradients of norms and biases: 5 norms, 4 biases of row layers.
    assert found["counted"]["all_reduce"] == (9, 8 * 32 * (5 * 2 + 4))


def test_where_it_cannot_be_the_reason_is_given() -> None:
    refused = trained(2)[0]["mixer"]["refused"]
    assert any(name.startswith("sequence after") and "stem" in reason for name, reason in refused.items())


def test_a_sequence_that_ranks_cannot_share_stays_whole() -> None:
    assert all(rank["odd_length"] < 1e-12 for rank in trained(2))
