"""The automatic split is the best there is, or within its slack of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hocket.parallel.pipeline import balance, measure, split
from hocket.planner.network._balance import Link, slowest

LINK = {"link": Link(1e6, 1e-4)}

steps = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 1_000_000)), min_size=1, max_size=9)


def ways(count: int, n: int) -> list[list[int]]:
    return [list(cut) for cut in itertools.combinations(range(1, count), n - 1)]


@settings(deadline=None, max_examples=60)
@given(steps, st.integers(1, 5))
def test_the_slowest_part_is_as_fast_as_by_brute_force(row: list[tuple[float, int]], n: int) -> None:
    n = min(n, len(row))
    times, nbytes = [t for t, _ in row], [b for _, b in row]
    best = min(slowest(way, times, nbytes, **LINK) for way in ways(len(row), n))
    found = balance(times, n, nbytes, **LINK)
    assert found == sorted(set(found))
    assert len(found) == n - 1
    assert slowest(found, times, nbytes, **LINK) <= best * (1 + 1e-9) + 1e-9


@settings(deadline=None, max_examples=60)
@given(steps, st.integers(2, 4), st.floats(0, 0.1))
def test_fewest_bytes_among_cuts_within_the_slack(row: list[tuple[float, int]], n: int, slack: float) -> None:
    n = min(n, len(row))
    times, nbytes = [t for t, _ in row], [b for _, b in row]
    best = min(slowest(way, times, nbytes, **LINK) for way in ways(len(row), n))
    found = balance(times, n, nbytes, slack=slack, **LINK)
    assert slowest(found, times, nbytes, **LINK) <= best * (1 + slack) + 1e-9
    within = [w for w in ways(len(row), n) if slowest(w, times, nbytes, **LINK) <= best * (1 + slack)]
    moved = min((sum(nbytes[at] for at in way) for way in within), default=None)
    assert moved is None or sum(nbytes[at] for at in found) <= moved


def test_every_part_holds_weights_if_it_can() -> None:
    times = [1.0, 5.0, 5.0, 1.0]
    assert balance(times, 2) == [2]
    assert balance(times, 2, holds=[False, False, True, True]) == [3]
    assert balance(times, 2, holds=[True, False, False, False]) == [2], "not enough of them: as if none did"


def test_a_cut_that_many_bytes_cross_is_avoided() -> None:
    assert balance([1.0, 1.0, 1.0, 1.0], 2) == [2]
    assert balance([1.0, 1.0, 1.0, 1.0], 2, [0, 10, 10**10, 10], link=Link(1e9)) in ([1], [3])


def test_where_the_link_decides_parts_compute_alike() -> None:
    # Over this link the inner parts take 20 s whatever they compute; alone it would not matter who computes what.
    assert balance([1.0] * 8, 4, [0, *[10**8] * 7], link=Link(1e7), slack=0.03) == [2, 4, 6]


def test_few_micro_batches_wait_for_every_message_so_narrow_cuts_are_better() -> None:
    times, nbytes, link = [4.0] * 4, [0, 1, 100, 1], Link(10.0, 0.0)  # 10 s in the middle, 0.1 s elsewhere
    assert balance(times, 2, nbytes, link=link) == [2]
    assert balance(times, 2, nbytes, link=link, micro_batches=100) == [2]  # 99 x 10 + 20 s, and 99 x 12 + 0.2 elsewhere
    assert balance(times, 2, nbytes, link=link, micro_batches=2) in ([1], [3])  # 10 + 20 s, and 12 + 0.2


@settings(deadline=None, max_examples=60)
@given(steps, st.integers(2, 4), st.integers(1, 16))
def test_the_number_of_micro_batches_makes_no_step_longer(row: list[tuple[float, int]], n: int, count: int) -> None:
    n = min(n, len(row))
    times, nbytes = [t for t, _ in row], [b for _, b in row]

    def step(cut: list[int]) -> float:
        messages = sum(2 * LINK["link"].seconds(nbytes[at]) for at in cut)
        return float((count - 1) * slowest(cut, times, nbytes, **LINK) + messages)

    plain = balance(times, n, nbytes, slack=0.03, **LINK)
    assert step(balance(times, n, nbytes, slack=0.03, micro_batches=count, **LINK)) <= step(plain) + 1e-9


def test_more_parts_than_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="2 steps into 3 parts"):
        balance([1.0, 1.0], 3)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_measured_layers_are_split_within_a_tenth_of_the_best() -> None:
    widths = [256, 64, 640, 32, 384, 512, 48]
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in zip([64, *widths], [*widths, 16], strict=True)])
    sample = (torch.randn(256, 64),)
    times = measure(model, sample)
    assert len(times.names) == len(widths) + 1
    assert min(times.forward_s) > 0
    crossing = [0, *(256 * 4 * width for width in widths)]
    for n in (2, 3, 4):
        stages = split(model, n, sample, times=times)
        begins = [int(stage.layers[0]) for stage in stages[1:]]
        assert [stage.nbytes for stage in stages[:-1]] == [crossing[at] for at in begins]
        best = min(slowest(way, times.total_s, crossing) for way in ways(len(times.names), n))
        assert slowest(begins, times.total_s, crossing) <= 1.1 * best


@pytest.mark.usefixtures("one_thread")
def test_a_wide_layer_is_measured_to_be_slower_than_a_narrow_one() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 2048), nn.Linear(2048, 32))
    times = measure(model, (torch.randn(256, 32),))
    narrow, *wide = times.total_s
    assert min(wide) > 3 * narrow
