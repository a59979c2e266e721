"""A pipeline's losses and weights are those of one process, whatever the schedule, the model and the optimizer."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from hocket.testing import run_ranks

from . import programs

EVEN = [16] * 20
UNEVEN = [16, 10, 7, 3, 1, 16, 5] + [16] * 13

CASES: dict[int, dict[str, programs.Case]] = {
    n: {
        f"mlp, {schedule} x {per_rank}, {optimizer}": {
            "model": "mlp",
            "schedule": schedule,
            "per_rank": per_rank,
            "optimizer": optimizer,
            "sizes": UNEVEN if optimizer == "sgd" else EVEN,
        }
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble")
        for per_rank in (1, 2)
        for optimizer in ("sgd", "adam")
    }
    for n in (2, 4)
}


@functools.cache
def results(n: int) -> list[dict[str, Any]]:
    return run_ranks(programs.many, n, CASES[n], timeout_s=100)


@pytest.mark.parametrize(("n", "name"), [(n, name) for n, cases in CASES.items() for name in cases])
def test_losses_and_weights_of_one_process(n: int, name: str) -> None:
    losses, parameters = programs.alone(CASES[n][name])
    seen = set()
    for rank in results(n):
        ours, weights = rank[name]
        np.testing.assert_allclose(ours, losses, rtol=2e-5)
        for parameter, value in weights.items():
            np.testing.assert_allclose(value, parameters[parameter], rtol=1e-3, atol=2e-5, err_msg=parameter)
        seen |= set(weights)
    assert seen == set(parameters)
