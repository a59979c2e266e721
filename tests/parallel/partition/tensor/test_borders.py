"""The operations at the borders of what is cut: values, gradients, and what they communicate."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from hocket.testing import run_ranks

from . import tensor_programs as programs

FULL_NBYTES = 24 * 4


@functools.cache
def ranks() -> list[dict[str, Any]]:
    return run_ranks(programs.borders, 2, timeout_s=60)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        # Layers in turn, outputs cut and then inputs: all_reduce once each way.
        ("reduce_from", "all_reduce", None),
        ("copy_to", None, "all_reduce"),
        # Outputs cut, and the next layer needs all: allgather forward, reduce_scatter backward.
        ("gather_partial", "all_gather", "reduce_scatter"),
        # Inputs cut, and the next layer needs its part: reduce_scatter forward, allgather backward.
        ("reduce_scatter", "reduce_scatter", "all_gather"),
        # To and from what is the same on all ranks.
        ("gather", "all_gather", None),
        ("scatter", None, "all_gather"),
    ],
)
def test_communication_is_that_of_the_form(name: str, forward: str | None, backward: str | None) -> None:
    """The forms are those of the tutorial on scale-out training (Hot Chips 2020), intra-layer parallelism."""
    for rank in ranks():
        expected = tuple({} if kind is None else {kind: (1, FULL_NBYTES)} for kind in (forward, backward))
        assert rank[name]["counted"] == expected


def test_values() -> None:
    full = np.array(ranks()[0]["full"])
    for rank in ranks():
        part = np.array(rank["part"])
        np.testing.assert_array_equal(rank["copy_to"]["out"], full)
        np.testing.assert_array_equal(rank["reduce_from"]["out"], 2 * full)
        np.testing.assert_array_equal(rank["gather"]["out"], full)
        np.testing.assert_array_equal(rank["gather_partial"]["out"], full)
        np.testing.assert_array_equal(rank["scatter"]["out"], part)
        np.testing.assert_array_equal(rank["reduce_scatter"]["out"], 2 * part)


@pytest.mark.parametrize(
    ("name", "expected"),
    # Every rank's loss has its number plus one for a factor.
    [
        ("copy_to", ((3, 8), 3.0, 3.0)),
        ("reduce_from", ((3, 8), 1.0, 2.0)),
        ("gather", ((3, 4), 1.0, 2.0)),
        ("gather_partial", ((3, 4), 3.0, 3.0)),
    ],
)
def test_gradients(name: str, expected: tuple[tuple[int, int], float, float]) -> None:
    shape, *values = expected
    for rank, value in zip(ranks(), values, strict=True):
        np.testing.assert_array_equal(rank[name]["grad"], np.full(shape, value))


@pytest.mark.parametrize("name", ["scatter", "reduce_scatter"])
def test_gradients_of_parts_are_put_together(name: str) -> None:
    row = [1.0] * 3 + [2.0] * 3 + [1.0, 2.0]  # the first three columns of the first segment are rank 0's
    for rank in ranks():
        np.testing.assert_array_equal(rank[name]["grad"], [row] * 3)
