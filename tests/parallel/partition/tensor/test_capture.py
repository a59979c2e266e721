"""What capture says of a divided model is what the Trainer's tensor parallelism makes of it, for every model here."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hocket.testing import run_ranks

from . import capture_programs as programs

WORLDS = [pytest.param(n, marks=pytest.mark.long) for n in (2, 4)]


@functools.cache
def found(ranks: int) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(programs.user_models_and_small_ones, ranks)


@pytest.mark.parametrize("ranks", WORLDS)
def test_parameters_gradients_state_and_exchanges_are_those_of_the_divided_model(ranks: int) -> None:
    for rank in found(ranks):
        for name, one in rank.items():
            assert one["said"] == one["is"], (ranks, name, one["forms"])
    assert any(one["said"]["exchanges"] for one in found(ranks)[0].values())


@pytest.mark.parametrize("ranks", WORLDS)
def test_activations_are_those_that_the_divided_model_keeps(ranks: int) -> None:
    for name, one in found(ranks)[0].items():
        said, kept = one["kept"]
        # What torch's attention keeps in other layouts, inside of one call, cannot all be told apart.
        assert abs(said - kept) <= 0.16 * kept + 1000, (ranks, name, said, kept)


@pytest.mark.parametrize("ranks", WORLDS)
def test_the_share_that_is_divided_is_the_planner_s_and_that_of_the_parameters_held(ranks: int) -> None:
    for name, one in found(ranks)[0].items():
        said, divided = one["divided"]
        assert abs(said["parameters"] - divided["parameters"]) < 1e-3, name
        assert abs(said["flops"] - divided["flops"]) < 1e-3, name
        assert abs(said["activations"] - divided["activations"]) < 0.05, name  # capture counts the loss, too
        held = 1 - divided["parameters"] * (1 - 1 / ranks)
        assert abs(one["held"] - held) < 1e-3, name


@pytest.mark.long
def test_a_divided_sequence_is_foretold_too() -> None:
    for found in run_ranks(programs.in_sequence, 2):
        assert found["gpt"]["changed"]
        assert found["seq2seq"]["changed"]
        for name, one in found.items():
            assert one["said"] == one["is"], name
            said, kept = one["kept"]
            assert abs(said - kept) <= 0.16 * kept, (name, said, kept)
