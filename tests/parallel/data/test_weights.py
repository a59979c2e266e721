"""Batches that ranks cannot share equally give the gradients and losses of the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hocket.testing import RankError, run_ranks

from ...asked import asked
from .. import weight_programs as programs


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Callable[[int], list[dict[str, programs.Result]]]:
    """What so many ranks have of the programs that are asked for."""
    names = list(dict.fromkeys(name for _, name in asked(request, "n", "name")))
    return functools.cache(lambda n: run_ranks(programs.equal, n, names, timeout_s=60))


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", programs.EQUAL)
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.long)])
def test_as_on_one_rank(n: int, name: str, results: Callable[[int], list[dict[str, programs.Result]]]) -> None:
    (alone,) = results(1)
    for rank in results(n):
        same(rank[name], alone[name])


def same(mine: programs.Result, expected: programs.Result) -> None:
    assert mine[0] == pytest.approx(expected[0], rel=1e-11)
    for ours, theirs in zip(mine[1], expected[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_what_weighs_nothing_may_be_infinite() -> None:
    (alone,) = run_ranks(programs.not_finite_where_nothing_counts, 1)
    for rank in run_ranks(programs.not_finite_where_nothing_counts, 3):
        same(rank, alone)


def test_weights_that_cannot_be_joined_are_refused() -> None:
    with pytest.raises(RankError, match=r"forward passes on batches of different sizes meet in one backward pass"):
        run_ranks(programs.weight_of_nothing_meets_another, 3)


def test_a_loss_without_forward_must_be_of_the_only_batch() -> None:
    with pytest.raises(RankError, match="a loss was computed without the model's forward while several loaders"):
        run_ranks(programs.two_batches_at_once_without_forward, 2)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("inside", ["model", "loss"])
def test_what_a_compiled_loss_counts_must_be_told(inside: str) -> None:
    with pytest.raises(RankError, match="computed within torch.compile, so that nothing tells"):
        run_ranks(programs.compiled, 2, inside, timeout_s=100)


@pytest.mark.long
def test_compiled_losses_that_count_alike_or_are_told_are_those_of_one_rank() -> None:
    (alone,) = run_ranks(programs.compiled_and_right, 1, timeout_s=100)
    for rank in run_ranks(programs.compiled_and_right, 2, timeout_s=100):
        for mine, expected in zip(rank, alone, strict=True):
            same(mine, expected)


def opaque() -> Any:
    class Answer:
        def __init__(self, value: Any) -> None:
            self.value = value

    class Model(programs.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = programs.net()

        def forward(self, x: Any) -> Answer:
            return Answer(self.net(x))

    programs.fit(Model(), lambda m, x, y: m(x).value.sum(), loss_reduction="sum")


def test_sums_need_outputs_that_can_be_seen_through() -> None:
    with pytest.raises(RankError, match="no tensor that requires a gradient in the model's output of type Answer"):
        run_ranks(opaque, 2)
