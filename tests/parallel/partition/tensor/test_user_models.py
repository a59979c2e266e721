"""Models as users write them, made tensor-parallel without a change to them, compute what they did."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hocket.testing import run_ranks

from ...user_models import CASES
from . import tensor_programs as programs

WORLDS = [2, pytest.param(4, marks=pytest.mark.long)]


@functools.cache
def trained(n: int) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(programs.all_user_models, n, timeout_s=240)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", WORLDS)
def test_gradients_and_eight_steps_are_those_of_the_plain_model(n: int, name: str) -> None:
    for rank in trained(n):
        found = rank[name]
        assert len(found["losses"]) == 8
        assert max(abs(a - b) for a, b in found["losses"]) < 1e-9
        assert found["gradients"] < 1e-9
        assert found["weights"] < 1e-8
        assert found["evaluation"] < 1e-8


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", WORLDS)
def test_a_step_communicates_what_was_foretold(n: int, name: str) -> None:
    for rank in trained(n):
        assert rank[name]["counted"] == rank[name]["expected"]


@pytest.mark.parametrize(("n", "share"), [(2, 0.55), pytest.param(4, 0.32, marks=pytest.mark.long)])
def test_every_rank_has_its_share_of_the_parameters(n: int, share: float) -> None:
    for name in CASES:
        assert trained(n)[0][name]["share"] < share, name


def test_attention_and_mlps_of_a_gpt_are_cut_in_pairs_and_the_tied_matrix_by_words() -> None:
    forms = trained(2)[0]["gpt"]["forms"]
    for block in ("h.0", "h.1"):
        assert forms[f"{block}.attn.c_attn"] == "column"
        assert forms[f"{block}.attn.c_proj"] == "row"
        assert forms[f"{block}.mlp.0"] == "column"
        assert forms[f"{block}.mlp.2"] == "row"
    assert forms["wte"] == "vocabulary"
    assert not trained(2)[0]["gpt"]["refused"]


def test_all_layers_of_a_chain_of_convolutions_are_in_pairs() -> None:
    forms = trained(2)[0]["cnn"]["forms"]
    assert [forms[f"features.{i}"] for i in (0, 3, 7, 10)] == ["column", "row"] * 2
    assert [forms[f"classifier.{i}"] for i in (0, 3)] == ["column", "row"]


def test_a_model_that_does_not_run_without_gradients_trains() -> None:
    alone = programs.forces(1)
    for found in run_ranks(programs.forces, 2, 2):
        assert found == pytest.approx(alone, rel=1e-12)
