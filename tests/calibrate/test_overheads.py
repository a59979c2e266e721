"""What takes turns."""

import functools
import math
import time

import pytest
import torch

from hocket.calibrate import _overheads
from hocket.calibrate._overheads import in_turns
from hocket.parallel.mesh import World, join
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


def test_what_is_hopeless_has_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    monkeypatch.setattr(_overheads, "timed", lambda step, *_: step())
    steps = [lambda seconds=seconds: (calls.append(seconds), seconds)[1] for seconds in (0.2, 0.01, 0.02)]
    measured = functools.partial(
        in_turns, device=torch.device("cpu"), world=World(0, 1, None), turns=4, together=3, long_s=math.inf
    )
    assert measured(steps, hopeless=5.0) == [0.2, 0.01, 0.02]
    assert [calls.count(seconds) for seconds in (0.2, 0.01, 0.02)] == [3, 12, 12]
    assert measured([]) == []


def uneven(late: int) -> list[float]:
    """Of each of two ranks every other step takes long, of both ranks another."""
    rank, calls = join().rank, iter(range(100))
    step = lambda: time.sleep(0.2 if next(calls) % 2 == rank * late else 0.0)  # noqa: E731
    return in_turns([step], torch.device("cpu"), join(), turns=6, together=1, long_s=math.inf)


def test_a_step_is_as_long_as_it_is_on_the_rank_that_is_the_slowest_in_it() -> None:
    for took in run_ranks(uneven, 2, 1):
        assert took[0] > 0.15  # though on each rank half of the steps take nothing
    for took in run_ranks(uneven, 2, 0):
        assert took[0] < 0.15
