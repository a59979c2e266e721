"""What cannot be cut stays whole, with a reason; what was guessed wrongly is found out on the sample."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hocket.testing import run_ranks

from . import tensor_programs as programs


@functools.cache
def found() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(programs.oddities, 2, timeout_s=120)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ("nine", "no dim can be shared out over 2 ranks"),
        ("spectral.parametrizations.weight.original", "mv has no rule"),
        ("indivisible", "neither 7 outputs nor 9 inputs can be shared out over 2 ranks"),
        ("outside", "its parameters are used outside of it"),
        ("unused", "the sample did not get there"),
        ("attn", "3 heads cannot be shared out over 2 ranks"),
        ("words", "max_norm changes its rows"),
    ],
)
def test_what_stays_whole_says_why(layer: str, reason: str) -> None:
    odd = found()[0]["odd"]
    assert odd["forms"][layer] == "whole"
    assert reason in odd["refused"][layer]


def test_the_rest_of_the_model_is_cut_all_the_same() -> None:
    forms = found()[0]["odd"]["forms"]
    assert forms["sorted"] == "column"
    assert forms["row_only"] == "row"
    assert forms["own"] == "dim 0"
    assert forms["normed.parametrizations.weight.original1"] == "dim 0"
    assert forms["sorting"] == "column"
    assert "outputs are gathered: in the model: sort works along the dim that is divided" in found()[0]["odd"]["text"]


@pytest.mark.parametrize("name", ["odd", "deceptive", "function"])
def test_it_computes_what_the_plain_model_does(name: str) -> None:
    for rank in found():
        assert rank[name]["outputs"] < 1e-12
        assert rank[name]["gradients"] < 1e-12
        assert rank[name]["counted"] == rank[name]["expected"]


def test_a_wrong_guess_costs_the_layers_that_it_was_about() -> None:
    deceptive = found()[0]["deceptive"]
    assert deceptive["forms"] == {"a": "column", "b": "row", "c": "column", "d": "column"}
    assert deceptive["text"].count("outputs are gathered: output 0 differs") == 2


def test_an_autograd_function_of_the_users_is_given_what_is_whole() -> None:
    function = found()[0]["function"]
    assert function["forms"] == {"a": "column", "b": "row", "c": "column", "d": "column"}
    assert "Centered has no rule" in function["text"]


def test_without_the_comparison_a_wrong_guess_is_wrong() -> None:
    assert found()[0]["trusting"]["gradients"] > 0.1


def test_ids_of_no_row_are_an_error_on_every_rank() -> None:
    for said in run_ranks(programs.unknown_words, 2):
        assert said == [f"row {wrong} of an embedding was looked up, and there are rows 0 to 5" for wrong in (6, -1)]
