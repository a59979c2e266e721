"""Divided tables: the curve and the weights of one process, whatever the form, the optimizer and the size of a part."""

import functools
from typing import Any

import numpy as np
import pytest

from hocket.testing import run_ranks

from . import programs


@functools.cache
def plain(optimizer_name: str) -> tuple[list[float], dict[str, Any]]:
    return programs.plain(optimizer_name)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_and_weights_are_those_of_one_process(ranks: int) -> None:
    """Batches of 8 and 2 samples: equal parts, and with 4 ranks parts of one sample and of none."""
    results = run_ranks(programs.all_cases, ranks)
    for (optimizer, how), (losses, weights) in results[0].items():
        expected_losses, expected = plain(optimizer)
        assert len(losses) == 12
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-10, err_msg=f"{optimizer}, {how}")
        for name, weight in weights.items():
            np.testing.assert_allclose(
                weight, expected[name], rtol=1e-8, atol=1e-10, err_msg=f"{optimizer}, {how}, {name}"
            )
    assert [r[case][0] for r in results for case in r] == [results[0][case][0] for _ in results for case in results[0]]


def test_sums_and_several_passes_give_the_gradients_of_one_process() -> None:
    alone = programs.both_gradients()
    for rank in run_ranks(programs.both_gradients, 2):
        for mine, theirs in zip(rank, alone, strict=True):
            for name, gradient in mine.items():
                np.testing.assert_allclose(gradient, theirs[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_recommender_learns_as_on_one_process(ranks: int) -> None:
    alone = programs.recommender(None, 24)
    for losses in run_ranks(programs.recommenders, ranks, 24)[0]:
        np.testing.assert_allclose(losses, alone, rtol=2e-5)


def test_collectives_and_bytes_of_a_step_are_the_expected_ones() -> None:
    """Three for each divided table forward and one backward: the numbers of rows, the rows, and their gradients."""
    for number, how in enumerate(programs.HOWS):
        for rank in run_ranks(programs.counts, 2):
            recorded, expected, decisions = rank[number]
            assert recorded == expected
            divided = 5 if how == "hybrid" else 6
            assert recorded[0] == 4 * divided, decisions


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_make_up_the_tables_and_parameters_stay_the_same_objects(ranks: int) -> None:
    weights = {name: parameter.detach().numpy() for name, parameter in programs.setting(False)[0].named_parameters()}
    results = run_ranks(programs.parts, ranks)
    for pieces in zip(*results, strict=True):
        name = pieces[0]["name"]
        ends = [piece["begin"] + len(piece["rows"]) for piece in pieces]
        assert [piece["begin"] for piece in pieces] == [0, *ends[:-1]]
        assert {piece["shape"] for piece in pieces} == {weights[name].shape}
        np.testing.assert_array_equal(np.concatenate([piece["rows"] for piece in pieces]), weights[name])
    assert {piece["name"] for piece in results[0]} == {
        f"{table}.weight" for table in ("people", "words", "sums", "means", "flat", "few")
    }


def test_what_cannot_be_divided_is_refused_with_a_reason_and_left_alone() -> None:
    refused, divided, messages = run_ranks(programs.refusals, 2)[0]
    assert divided == ["good.weight"]
    assert {name: reason.split(",")[0] for name, reason in refused.items()} == {
        "own.weight": "Own may look rows up in a way of its own",
        "renormed.weight": "max_norm changes rows when they are looked up",
        "frequent.weight": "scale_grad_by_freq counts otherwise in a bag than where the rows are",
        "tied.weight": "its weight is also that of out.weight",
    }
    assert messages == [
        "IndexError: good.weight: row 8 was looked up, and there are rows 0 to 7",
        "IndexError: good.weight: row -2 was looked up, and there are rows 0 to 7",
        "ValueError: good.weight: bags are a matrix, or one axis with offsets; not 1 axes",
        "ValueError: good.weight: a matrix of bags has no offsets",
        "ValueError: good.weight: per_sample_weights have shape [2], the numbers of rows [1, 2]",
    ]


def test_nothing_frozen_and_tiny_tables_are_looked_up_as_torch_does() -> None:
    for rank in run_ranks(programs.edges, 3):
        assert all(rank), rank
