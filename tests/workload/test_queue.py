"""What is told of a device that works behind the host, by clocks that are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hocket.workload import _timing
from hocket.workload._queue import behind, by_batch, whole_step
from hocket.workload._timing import Timing, by_whole_steps, dealt, time_of

LAUNCH_S = 20e-6


class _Fake:
    """A host that launches kernels, and a device that does them in turn."""

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def launch(self, seconds: float) -> None:
        self.host += LAUNCH_S
        self.device = max(self.device, self.host) + seconds

    def host_s(self) -> float:
        return self.host

    def mark(self) -> float:
        return max(self.device, self.host)

    def between_s(self, one: Any, other: Any) -> float:
        return float(other) - float(one)

    def settle(self) -> None:
        self.host = max(self.host, self.device) + 10e-6

    def occupy(self, seconds: float) -> None:
        self.device = max(self.device, self.host) + seconds

    def step(self, part: float, kernels: int, head_s: float, fixed: float = 0.0) -> Callable[[], None]:
        """Light kernels of 40 us, and a heavy one in their middle; of each a part does not shrink."""
        shrunk = fixed + (1 - fixed) * part

        def step() -> None:
            for number in range(kernels):
                self.launch((head_s if number == kernels // 2 else 40e-6) * shrunk)

        return step


def _told(kernels: int, head_s: float, fixed: float, parts: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125)) -> Any:
    queue = _Fake()
    return by_batch({part: whole_step(queue, queue.step(part, kernels, head_s, fixed), 3) for part in parts})


@pytest.mark.parametrize("fixed", [0.0, 0.1, 0.3])
def test_a_step_that_hides_its_launches_has_nothing_of_them_in_what_does_not_shrink(fixed: float) -> None:
    found = _told(600, 20e-3, fixed)  # 44 ms of the device, 12 of the host
    assert found.seconds == pytest.approx(44e-3, rel=0.01)
    assert found.fixed == pytest.approx(fixed, abs=0.01)
    assert found.launch_s == pytest.approx(600 * LAUNCH_S)


def test_below_the_smallest_batch_that_hides_them_launches_are_a_floor() -> None:
    queue, found = _Fake(), _told(600, 20e-3, 0.05)
    for part in (0.5, 0.25, 0.125):
        told = max(found.launch_s, found.seconds * (found.fixed + (1 - found.fixed) * part))
        assert told == pytest.approx(whole_step(queue, queue.step(part, 600, 20e-3, 0.05), 3).seconds, rel=0.05), part


def test_two_sizes_of_which_one_is_just_busy_do() -> None:
    found = _told(2400, 60e-3, 0.02, (1.0, 0.5))  # 156 ms of the device, 48 of the host
    assert (found.seconds, found.fixed) == (pytest.approx(156e-3, rel=0.01), pytest.approx(0.02, abs=0.01))


def test_a_model_whose_whole_batch_waits_for_the_host_takes_as_long_whatever_the_batch() -> None:
    queue = _Fake()

    def step() -> None:
        for _ in range(100):
            queue.launch(1e-6)

    bound = by_batch({part: whole_step(queue, step, 3) for part in (1.0, 0.5)})
    assert bound.fixed == pytest.approx(1.0, abs=0.02)
    assert bound.seconds == pytest.approx(bound.launch_s, rel=0.02)
    assert by_batch({1.0: whole_step(queue, step, 3)}).fixed == 0


def test_an_update_behind_other_work_takes_the_device_s_time_alone() -> None:
    queue = _Fake()

    def update() -> None:
        for _ in range(100):
            queue.launch(5e-6)

    assert behind(queue, update) == pytest.approx(100 * 5e-6)
    alone = queue.host_s()
    update()
    assert queue.mark() - alone > 100 * LAUNCH_S  # as it was measured before


def test_what_does_not_shrink_is_dealt_in_the_proportions_of_units() -> None:
    seconds = {0: 1.0, 1: 3.0, 2: 6.0}
    for fixed, shares in (
        (0.05, {0: 0.8, 1: 0.2, 2: 0.1}),
        (0.5, {0: 1.0, 1: 0.5, 2: 0.1}),
        (0.2, dict.fromkeys(seconds, 0.0)),
    ):
        found = dealt(fixed, seconds, shares)
        assert sum(found[i] * seconds[i] for i in seconds) == pytest.approx(10 * fixed)
        assert all(0 <= one <= 1 for one in found.values())
        assert found[0] >= found[1] >= found[2]
    assert dealt(1.0, seconds, {0: 1.0, 1: 0.5, 2: 0.0}) == dict.fromkeys(seconds, 1.0)
    assert dealt(0.0, seconds, dict.fromkeys(seconds, 1.0)) == dict.fromkeys(seconds, 0.0)


def test_units_sum_to_the_whole_step_not_to_what_hooks_have_lengthened() -> None:
    queue, model = _Fake(), nn.Linear(4, 4)

    def run(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        queue.step(len(batch) / 16, 600, 20e-3, 0.1)()
        out: torch.Tensor = model(batch).sum()
        return out

    hooked = Timing({0: 10e-3, 1: 10e-3}, {0: 10e-3, 1: 20e-3}, {0: 0.8, 1: 0.4})
    found = by_whole_steps(hooked, model, torch.zeros(16, 4), run, 3, queue)
    assert sum(found.forward_s.values()) + sum(found.backward_s.values()) == pytest.approx(44e-3, rel=0.01)
    assert found.fixed_share[0] == pytest.approx(2 * found.fixed_share[1])
    assert found.launch_s == pytest.approx(600 * LAUNCH_S)


@pytest.mark.parametrize("count", [2, 32])
def test_what_does_not_grow_with_the_batch_is_told_by_a_smaller_one_or_where_there_is_none_by_a_larger(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    def steps(model: nn.Module, units: Any, batch: Any, *_: Any) -> tuple[dict[int, float], dict[int, float]]:
        sizes.append(len(batch[0]))
        return {0: 3.0 + 1.0 * len(batch[0])}, {0: 5.0 + 2.0 * len(batch[0])}

    sizes: list[int] = []
    monkeypatch.setattr(_timing, "_usual_steps", steps)
    model, batch = nn.Linear(1, 1), (torch.zeros(count, 1), torch.zeros(7))
    told = time_of(model, [], batch, lambda *_: torch.zeros(()), 1, roomy=4)
    assert told.fixed_share[0] == pytest.approx(8 / (8 + 3 * count))
    assert sizes == [count, 8 if count == 2 else 4]
    if count == 2:
        assert time_of(model, [], batch, lambda *_: torch.zeros(()), 1).fixed_share == {0: 0.0}
