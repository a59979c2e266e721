"""Bundled workloads under plans: a few cells of the matrix that `benchmarks.equivalence` prints in full."""

from __future__ import annotations

import pytest

from benchmarks import equivalence
from hocket.testing import run_ranks

CELLS = {"language_model": ("parameters", "tensor", "pipeline"), "recommender": ("gradients", "embeddings")}


@pytest.mark.parametrize("name", CELLS)
def test_a_workload_loses_what_one_process_loses(name: str) -> None:
    plans = {title: equivalence.PLANS[2][title] for title in CELLS[name]}
    reference = {optimizer: equivalence.alone(name, optimizer) for optimizer in equivalence.OPTIMIZERS}
    for found in run_ranks(equivalence.by_plans, 2, name, plans, timeout_s=110):
        for (optimizer, title), losses in found.items():
            apart = equivalence.difference(losses, reference[optimizer])
            assert isinstance(apart, float), apart
            assert apart <= equivalence.TOLERANCE, (optimizer, title)
