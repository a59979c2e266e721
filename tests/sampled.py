"""Which cases of a test `make test` leaves out: those marked `sampled(n)` run n of them there, and all in CI."""

from collections.abc import Iterable

import pytest


def beyond_samples(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the cases that are not in the sample of their test: n of them, from the first to the last."""
    cases: dict[str, list[pytest.Item]] = {}
    sizes: dict[str, int] = {}
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is not None:
            test = item.nodeid.partition("[")[0]
            cases.setdefault(test, []).append(item)
            (sizes[test],) = mark.args
    return [
        item for test, some in cases.items() for i, item in enumerate(some) if i not in sample(len(some), sizes[test])
    ]


def sample(count: int, size: int) -> set[int]:
    """Return the places of so many of `count` cases: the first alone, or the first, the last and others between."""
    size = min(size, count)
    return {i * (count - 1) // max(1, size - 1) for i in range(size)}
