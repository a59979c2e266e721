"""How a pipeline runs: recomputation, evaluation, what it tells, what it refuses, and how it fails."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest

from hocket.parallel.pipeline import bubble
from hocket.testing import RankError, deadline, run_ranks

from . import run_programs


@functools.cache
def recomputed() -> list[dict[Any, Any]]:
    return run_ranks(run_programs.recomputed, 2, timeout_s=100)


@functools.cache
def facts() -> list[dict[str, Any]]:
    return run_ranks(run_programs.odds_and_ends, 2, timeout_s=100)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["stage", "layer"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("model", ["mlp", "cnn, frozen norms", "gpt", "cnn"])
def test_recomputation_changes_no_number_and_keeps_less(model: str, schedule: str, how: str) -> None:
    for rank in recomputed():
        loss, gradients, buffers, most = rank[model, schedule, "none"]
        ours = rank[model, schedule, how]
        assert ours[0] == pytest.approx(loss, rel=1e-12)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(ours[1][name], gradient, rtol=1e-9, atol=1e-12, err_msg=name)
        for name, buffer in buffers.items():
            np.testing.assert_array_equal(ours[2][name], buffer, err_msg=name)
        if schedule == "gpipe":
            assert ours[3] < most


def test_evaluation_is_the_models_on_every_rank() -> None:
    for rank in facts():
        ours, expected = rank["evaluate"]
        assert ours == pytest.approx(expected, rel=1e-12)
        np.testing.assert_allclose(*rank["forward everywhere"], rtol=1e-9, atol=1e-12)
        assert rank["forward"] == rank["holds last"]
    assert [rank["holds last"] for rank in facts()] == [False, True]


def test_more_ranks_than_two_get_the_output_too() -> None:
    for ours, expected in run_ranks(run_programs.forward_everywhere, 3, timeout_s=60):
        np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12)


def test_a_weight_scales_loss_and_gradients_and_steps_accumulate() -> None:
    for rank in facts():
        loss, gradients = rank["weight 1.0"]
        less, smaller = rank["weight 0.25"]
        assert less == pytest.approx(loss / 4)
        ours, twice = rank["accumulated"]
        for name in gradients:
            np.testing.assert_allclose(ours[name], twice[name], rtol=1e-9, atol=1e-12)
        assert smaller.keys() == gradients.keys()


def test_copies_of_a_tied_weight_see_the_very_same_gradient() -> None:
    first, last = (rank["weight 1.0"][1]["wte.weight"] for rank in facts())
    np.testing.assert_array_equal(first, last)
    assert [rank["tied"] for rank in facts()] == [1, 1]


def test_spans_tell_what_was_computed_when() -> None:
    for number, rank in enumerate(facts()):
        assert rank["spans"] == sorted(f"{number}{kind}{micro}" for kind in "FB" for micro in range(4))
        assert rank["busy"]


def test_a_stage_is_told_before_its_last_backward_and_when_its_gradients_are_complete() -> None:
    assert [rank["told"] for rank in facts()] == [
        ["last 2", "done 2", "last 0", "done 0"],
        ["last 3", "done 3", "last 1", "done 1"],
    ]


def test_shapes_that_depend_on_numbers_cross() -> None:
    for rank in facts():
        assert rank["ragged"][0] == pytest.approx(rank["ragged"][1], rel=1e-12)


def test_shapes_that_depend_on_numbers_are_an_error_where_they_are_said_not_to() -> None:
    with pytest.raises(RankError, match=r"what stage 0 sends to stage 1 has other shapes.*fixed_shapes=False"):
        run_ranks(run_programs.data_dependent_shape, 2, group_timeout_s=5)


def test_batch_norm_in_micro_batches_is_warned_of_once() -> None:
    for rank in facts():
        (message,) = rank["norms"]
        assert "differ from those of one process" in message
        assert "micro_batches = 1" in message


@pytest.mark.parametrize(
    "words",
    [
        ("'pipedream' is not known", "zero_bubble"),
        ("micro_batches = 5 cannot be run by the schedule 'interleaved' on 2 ranks", "take 6", "gpipe"),
        ("micro_batches = 0", "1 or more"),
        ("recompute = 'all' is not known", "layer"),
        ("loss_reduction = 'max' is not known",),
    ],
)
def test_refusals_name_value_and_remedy(words: tuple[str, ...]) -> None:
    for rank in facts():
        assert any(all(word in message for word in words) for message in rank["refusals"]), rank["refusals"]


def test_stages_of_another_rank_are_refused() -> None:
    assert "was given the stages [0, 1] of 2" in facts()[1]["wrong stages"]


@pytest.mark.long
@pytest.mark.flaky(reruns=2)  # it measures, on a machine that may be busy
def test_idle_share_of_balanced_stages_is_the_formulas_within_five_points() -> None:
    shares = run_ranks(run_programs.idle, 3)[0]
    for (schedule, micro), share in shares.items():
        assert share == pytest.approx(bubble(3, micro), abs=0.05), schedule


def test_a_dead_peer_ends_the_step_in_an_error_that_names_it() -> None:
    message, seconds = run_ranks(run_programs.peer_dies, 2, expect_death=[1], group_timeout_s=20)[0]
    assert re.search(r"rank 1 (\(process \d+\) )?died", message)
    assert seconds < deadline(10)
