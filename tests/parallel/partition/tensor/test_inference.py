"""What is found in the many ways in which people write layers, and that it computes what the plain module does."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hocket.testing import run_ranks

from . import tensor_programs as programs
from .small_models import MODELS

WORLDS = [2, pytest.param(4, marks=pytest.mark.long)]


@functools.cache
def stepped(n: int) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(programs.all_small_models, n, timeout_s=240)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", WORLDS)
def test_outputs_and_gradients_are_those_of_the_plain_module(n: int, name: str) -> None:
    for rank in stepped(n):
        assert rank[name]["outputs"] < 1e-11
        assert rank[name]["gradients"] < 1e-11
        assert rank[name]["evaluation"] < 1e-11


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", WORLDS)
def test_a_pass_communicates_what_was_foretold(n: int, name: str) -> None:
    for rank in stepped(n):
        assert rank[name]["counted"] == rank[name]["expected"]


@pytest.mark.parametrize(
    ("name", "columns", "rows"),
    [
        ("gated_mlp", {"w1", "w3"}, {"w2"}),
        ("fused_gate", {"up"}, {"down"}),
        ("glu", {"up"}, {"down"}),
        ("separate_heads", {"q_proj", "k_proj", "v_proj"}, {"o_proj"}),
        ("fused_vit", {"qkv"}, {"proj"}),
        ("per_head_fused", {"query_key_value"}, {"dense"}),
        ("llama", {"wq", "wk", "wv"}, {"wo"}),
        ("fused_grouped", {"wqkv"}, {"wo"}),
        ("einsum_attention", {"qkv"}, {"out"}),
        ("inverted", {"expand"}, {"project"}),
        ("upsampler", {"up"}, {"tail"}),
        ("volume", {"c1", "c3"}, {"c2", "head"}),
    ],
)
def test_layers_pair_up(name: str, columns: set[str], rows: set[str]) -> None:
    forms = stepped(2)[0][name]["forms"]
    assert {n for n, form in forms.items() if form == "column"} == columns
    assert {n for n, form in forms.items() if form == "row"} == rows


@pytest.mark.parametrize("name", ["gated_mlp", "fused_gate", "separate_heads", "fused_vit", "llama", "fused_grouped"])
@pytest.mark.parametrize("n", WORLDS)
def test_a_pair_needs_one_all_reduce_forward_and_one_backward(n: int, name: str) -> None:
    found = stepped(n)[0][name]
    tokens_nbytes = 3 * 6 * 16 * 8
    extra = 2 if name == "fused_grouped" else 0  # the norm within heads, used twice, whose gradients are added up
    count, nbytes = found["counted"]["all_reduce"]
    assert list(found["counted"]) == ["all_reduce"]
    assert count - extra == 2
    assert nbytes - extra * 8 * 8 == 2 * tokens_nbytes


def test_a_layer_that_is_used_twice_is_cut_in_one_way() -> None:
    assert stepped(2)[0]["joined"]["forms"]["again"] == "column"


def test_a_common_matrix_is_cut_by_words_or_else_by_features() -> None:
    assert stepped(2)[0]["tied_even"]["forms"] == {"embed": "vocabulary", "out": "column"}
    assert stepped(2)[0]["tied_odd"]["forms"] == {"embed": "column", "out": "row"}
