"""What takes turns."""

import math
import time

import pytest
import torch

from hocket.calibrate._overheads import in_turns
from hocket.parallel.mesh import join
from hocket.testing import run_ranks


class Cold:
    """A step that takes long only the first time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        time.sleep(1.0 if self.calls == 1 else 0.01)


def measured(long_s: float, until_s: float, together: int) -> tuple[list[float], list[int]]:
    steps = [Cold(), Cold()]
    took = in_turns(steps, torch.device("cpu"), join(), turns=5, together=together, long_s=long_s, until_s=until_s)
    return took, [step.calls for step in steps]


@pytest.mark.long
@pytest.mark.parametrize(
    ("long_s", "until_s", "together", "calls"),
    [(math.inf, math.inf, 1, 5), (math.inf, 0.0, 1, 3), (0.0, math.inf, 1, 3), (0.0, math.inf, 3, 3)],
)
def test_a_first_step_never_counts_however_little_time_there_is(
    long_s: float, until_s: float, together: int, calls: int
) -> None:
    for took, made in run_ranks(measured, 2, long_s, until_s, together):
        assert made == [calls, calls]
        assert max(took) < 0.8
