"""A pipeline's losses and weights are those of one process, whatever the schedule, the model and the optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hocket.testing import run_ranks

from ...asked import asked
from . import programs

EVEN = [16] * 7
UNEVEN = [16, 10, 7, 3, 1, 16, 5]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")

# By hand: halves where no named order has them, and messages as they come.
BY_HAND = """
order by-hand ranks=2 stages=2 micro_batches=4
rank 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0F3 0SEND_F3 0RECV_B1 0B1 0RECV_B2 0I2 0RECV_B3 0B3 0W2
rank 1
  1RECV_F0 1F0 1RECV_F1 1F1 1I0 1SEND_B0 1RECV_F2 1B1 1SEND_B1 1W0 1F2 1B2 1SEND_B2 1RECV_F3 1F3 1B3 1SEND_B3
"""


# In a V, with a turn on the second rank, and with more of the one stage before the other than a named order has.
V_BY_HAND = """
order v-by-hand ranks=2 stages=4 micro_batches=4
rank 0
  0F0 0F1 0F2 3F0 3I0 3F1 3B1 0F3 0B1 3W0 3F2 3F3 3B2 3B3 0I0 0B2 0W0 0B3
rank 1
  1F0 1F1 2F0 2F1 1F2 2B1 1I1 2B0 1B0 1W1 1F3 2F2 2F3 2B2 1B2 2I3 1B3 2W3
"""


def case(n: int, model: str, schedule: str, per_rank: int, optimizer: str, **more: Any) -> programs.Case:
    sizes = UNEVEN if optimizer == "sgd" else EVEN
    plain = {"model": model, "schedule": schedule, "per_rank": per_rank, "optimizer": optimizer, "sizes": sizes}
    return plain | more


def cases(n: int) -> dict[str, programs.Case]:
    found = [case(n, "mlp", schedule, per_rank, "sgd") for schedule in SCHEDULES for per_rank in (1, 2)]
    for i, model in enumerate(["gpt", "seq2seq", "mixer", "recurrent", "frozen", "cnn, frozen norms"]):
        found.append(case(n, model, SCHEDULES[(i + n) % 4], 1, "adam"))
        found.append(case(n, model, SCHEDULES[(i + n + 1) % 4], 1, "sgd"))
    found.append(case(n, "unet, frozen norms", "zero_bubble", 1, "sgd"))
    found.append(case(n, "unet, frozen norms", "1f1b", 1, "adam"))
    found += [case(n, "mlp", "zero_bubble_v", 2, "sgd"), case(n, "mixer", "zero_bubble_v", 2, "adam")]
    if n == 2:
        found += [case(n, model, V_BY_HAND, 2, optimizer) for model, optimizer in (("gpt", "adam"), ("mlp", "sgd"))]
        found += [case(n, model, BY_HAND, 1, optimizer) for model, optimizer in (("gpt", "adam"), ("mlp", "sgd"))]
    for model in ("cnn", "unet"):
        found.append(case(n, model, "gpipe", 1, "sgd", micro=1))
        found.append(case(n, model, "gpipe", 1, "adam", micro=1))
    return {", ".join(f"{c[key]}" for key in ("model", "schedule", "per_rank", "optimizer")): c for c in found}


CASES = {n: cases(n) for n in (2, 4)}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Callable[[int], list[dict[str, Any]]]:
    """What each of so many ranks has of each case."""

    @functools.cache
    def run(n: int) -> list[dict[str, Any]]:
        names = [name for ranks, name in asked(request, "n", "name") if ranks == n]
        return run_ranks(programs.many, n, {name: CASES[n][name] for name in names}, timeout_s=100)

    return run


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("n", "name"),
    [pytest.param(n, name, marks=[pytest.mark.long] if n == 4 else []) for n, cases in CASES.items() for name in cases],
)
def test_losses_and_weights_of_one_process(n: int, name: str, results: Callable[[int], list[dict[str, Any]]]) -> None:
    losses, parameters = programs.alone(CASES[n][name])
    seen = set()
    for rank in results(n):
        ours, weights = rank[name]
        np.testing.assert_allclose(ours, losses, rtol=1e-9)
        for parameter, value in weights.items():
            np.testing.assert_allclose(value, parameters[parameter], rtol=1e-6, atol=1e-9, err_msg=parameter)
        seen |= set(weights)
    assert seen == set(parameters)
