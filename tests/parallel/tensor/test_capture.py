"""What capture says of a divided model is what the Trainer's tensor parallelism makes of it, for every model here."""

from __future__ import annotations

import functools
from typing import Any

from hocket.testing import run_ranks

from . import capture_programs as programs


@functools.cache
def found(ranks: int) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(programs.user_models_and_small_ones, ranks)


def test_parameters_gradients_state_and_exchanges_are_those_of_the_divided_model() -> None:
    for ranks in (2, 4):
        for rank in found(ranks):
            for name, one in rank.items():
                assert one["said"] == one["is"], (ranks, name, one["forms"])
        assert any(one["said"]["exchanges"] for one in found(ranks)[0].values())


def test_activations_are_those_that_the_divided_model_keeps() -> None:
    for ranks in (2, 4):
        for name, one in found(ranks)[0].items():
            said, kept = one["kept"]
            # What torch's attention keeps in other layouts, inside of one call, cannot all be told apart.
            assert abs(said - kept) <= 0.16 * kept + 1000, (ranks, name, said, kept)
