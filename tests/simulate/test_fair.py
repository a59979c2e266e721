"""Rates are max-min fair, never beyond a link, and quickly found."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hocket.simulate import Usage, max_min

from ..pace import timed

Floats = NDArray[np.float64]


def random_usage(random: np.random.Generator, flows: int, links: int, most: int) -> Usage:
    counts = random.integers(1, most + 1, flows)
    rows = [np.sort(random.choice(links, min(count, links), replace=False)) for count in counts]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return Usage(offsets, np.concatenate(rows), np.ones(int(offsets[-1])))


def loads(usage: Usage, rates: Floats, links: int) -> Floats:
    each = usage.shares * np.repeat(rates, np.diff(usage.offsets))
    return np.asarray(np.bincount(usage.links, weights=each, minlength=links), dtype=np.float64)


def held_back(usage: Usage, rates: Floats, capacity: Floats, level: Floats) -> NDArray[np.bool_]:
    """Of every flow: whether one of its links is full and no flow there has more (Bertsekas and Gallager, 6.5.2)."""
    full = loads(usage, rates, len(capacity)) >= capacity * (1 - 1e-9)
    counts = np.diff(usage.offsets)
    most = np.zeros(len(capacity))
    np.maximum.at(most, usage.links, np.repeat(level, counts))
    own = np.repeat(level, counts) >= most[usage.links] * (1 - 1e-9)
    return np.logical_or.reduceat(full[usage.links] & own, usage.offsets[:-1])


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 30))
def test_rates_are_feasible_and_every_flow_is_held_back_somewhere(seed: int, flows: int, links: int) -> None:
    random = np.random.default_rng(seed)
    usage = random_usage(random, flows, links, 5)
    capacity = random.uniform(1.0, 1e10, links)
    rates = max_min(usage, capacity)
    assert (loads(usage, rates, links) <= capacity).all()
    assert held_back(usage, rates, capacity, rates).all()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_weights_and_limits_are_kept(seed: int, flows: int) -> None:
    random = np.random.default_rng(seed)
    usage = random_usage(random, flows, 12, 4)
    capacity, weight = random.uniform(1, 10, 12), random.uniform(0.1, 5, flows)
    limit = np.where(random.random(flows) < 0.5, random.uniform(0.01, 2, flows), np.inf)
    rates = max_min(usage, capacity, weight=weight, limit_Bps=limit)
    assert (loads(usage, rates, 12) <= capacity).all()
    assert (rates <= limit).all()
    assert (held_back(usage, rates, capacity, rates / weight) | (rates >= limit * (1 - 1e-9))).all()


def test_the_textbook_example() -> None:
    # Two links of 1; one flow over both, one over the first, two over the second.
    usage = Usage(np.array([0, 2, 3, 4, 5]), np.array([0, 1, 0, 1, 1]), np.ones(5))
    assert max_min(usage, np.ones(2)) == pytest.approx([1 / 3, 2 / 3, 1 / 3, 1 / 3], rel=1e-15)


def test_a_flow_that_crosses_a_link_twice_gets_half() -> None:
    usage = Usage(np.array([0, 1]), np.array([0]), np.array([2.0]))
    assert max_min(usage, np.array([1.0])) == pytest.approx([0.5])


@pytest.mark.flaky(reruns=2)  # it measures, on a machine that may be busy
def test_10000_flows_on_random_paths_are_solved_in_half_a_second() -> None:
    random = np.random.default_rng(5)
    links = np.concatenate([random.choice(3000, 6, replace=False) for _ in range(10_000)])
    usage = Usage(np.arange(10_001) * 6, links, np.ones(60_000))
    capacity = random.uniform(1e9, 2e9, 3000)
    max_min(usage, capacity)  # the first time on a machine compiles it
    rates, took_s = timed(lambda: max_min(usage, capacity))
    assert held_back(usage, rates, capacity, rates).all()
    assert took_s < 0.5
