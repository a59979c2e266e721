"""Bundled workloads under plans: a few cells of the matrix that `benchmarks.equivalence` prints in full."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import equivalence
from hocket.testing import run_ranks

CELLS = {"language_model": ("parameters", "tensor", "pipeline"), "recommender": ("gradients", "embeddings")}
STEPS = 8  # of the benchmark's 20: two epochs


def by_plans(name: str, plans: dict[str, dict[str, Any]]) -> dict[tuple[str, str], list[float] | str]:
    equivalence.STEPS = STEPS
    return equivalence.by_plans(name, plans)


@pytest.mark.long
@pytest.mark.parametrize("name", CELLS)
def test_a_workload_loses_what_one_process_loses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equivalence, "STEPS", STEPS)
    plans = {title: equivalence.PLANS[2][title] for title in CELLS[name]}
    reference = {optimizer: equivalence.alone(name, optimizer) for optimizer in equivalence.OPTIMIZERS}
    for found in run_ranks(by_plans, 2, name, plans, timeout_s=110):
        for (optimizer, title), losses in found.items():
            apart = equivalence.difference(losses, reference[optimizer])
            assert isinstance(apart, float), apart
            assert apart <= equivalence.TOLERANCE, (optimizer, title)
