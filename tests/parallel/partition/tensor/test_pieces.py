"""What checkpoints and other forms of parallelism need to know about a cut model."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from hocket.testing import run_ranks

from . import tensor_programs as programs


@functools.cache
def ranks() -> list[dict[str, Any]]:
    return run_ranks(programs.pieces, 2, timeout_s=120)


@pytest.mark.parametrize("kind", ["mine", "boxes"])
def test_the_pieces_of_all_ranks_make_the_full_model(kind: str) -> None:
    full = {name: np.array(value) for name, value in ranks()[0]["full"].items()}
    made = {name: np.full_like(value, np.nan) for name, value in full.items()}
    for rank in ranks():
        for name, offsets, piece in rank[kind]:
            values = np.array(piece)
            made[name][tuple(slice(o, o + s) for o, s in zip(offsets, values.shape, strict=True))] = values
    for name, value in full.items():
        np.testing.assert_array_equal(made[name], value, err_msg=name)


def test_shapes_are_those_of_the_full_model() -> None:
    for name, shape in ranks()[0]["shapes"].items():
        assert list(np.array(ranks()[0]["full"][name]).shape) == shape


def test_parameters_modules_and_names_stay_what_they_were() -> None:
    for rank in ranks():
        assert rank["identity"]
        assert rank["keys"]
        assert rank["kinds"]


def test_a_copy_of_a_cut_model_computes_the_same() -> None:
    assert all(rank["twin"] for rank in ranks())


def test_a_graph_is_told_which_modules_to_leave_alone() -> None:
    leaves = ranks()[0]["leaves"]
    assert {"h.0.attn.c_attn", "h.0.mlp.0", "h.0.mlp.2", "wte", "lm_head"} <= set(leaves)
    assert "h.0.mlp.1" not in leaves
