"""Tensor-parallel models can be split into the stages of a pipeline, and their blocks computed again."""

from __future__ import annotations

import pytest

from hocket.testing import run_ranks

from . import tensor_programs as programs


def test_blocks_of_a_cut_model_can_be_computed_again_in_back_propagation() -> None:
    for rank in run_ranks(programs.recomputed, 2, timeout_s=60):
        assert rank["blocks"] == 3
        assert rank["gradients"] < 1e-12


@pytest.mark.parametrize("sequence", [False, True])
def test_stages_of_a_cut_model_compute_what_the_plain_model_does(sequence: bool) -> None:
    for rank in run_ranks(programs.staged, 2, sequence, timeout_s=90):
        assert rank["gpt"] < 1e-12
        assert rank["cnn"] < 1e-12
