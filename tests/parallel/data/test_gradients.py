"""Gradients are the averages over ranks, in whatever way a program comes by them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from hocket.testing import run_ranks

from .. import gradient_programs as programs

# Ranks may be added in another order than Gloo adds them: a few units in the last place of the type.
TOLERANCE = {"float64": 1e-13, "bfloat16": 2e-2, "float16": 2e-3, "mixed_types": 2e-2, "autocast_and_scaler": 2e-2}
WORLDS = [("hocket", 2), *(pytest.param(*world, marks=pytest.mark.long) for world in (("hocket", 3), ("gloo", 2)))]


@functools.cache
def ddp_and_ours(backend: str, n: int) -> list[dict[str, Any]]:
    return run_ranks(programs.side_by_side, n, backend=backend, timeout_s=90)


@functools.cache
def hand_and_ours(backend: str, n: int) -> list[dict[str, Any]]:
    return run_ranks(programs.against_hand, n, backend=backend, timeout_s=90)


@pytest.mark.parametrize("name", programs.ALIKE)
@pytest.mark.parametrize(("backend", "n"), WORLDS)
def test_as_in_ddp(backend: str, n: int, name: str) -> None:
    for rank in ddp_and_ours(backend, n):
        theirs, ours = rank[name]
        assert len(theirs) == len(ours) > 0
        assert_equal(ours, theirs, TOLERANCE.get(name, 2e-6))


@pytest.mark.parametrize("name", programs.AGAINST_HAND)
@pytest.mark.parametrize(("backend", "n"), WORLDS)
def test_as_averaged_by_hand(backend: str, n: int, name: str) -> None:
    for rank in hand_and_ours(backend, n):
        assert rank[name]
        for ours, expected in rank[name]:
            assert_equal(ours, expected, 2e-6)


def assert_equal(ours: list[Any], expected: list[Any], tolerance: float) -> None:
    for i, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        assert (mine is None) == (theirs is None), f"value {i}: {mine} against {theirs}"
        if mine is not None:
            np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance, err_msg=f"value {i}")
