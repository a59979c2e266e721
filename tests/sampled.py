"""Which tests a run leaves out: of `sampled(n)` what is beyond n cases, and of long tests what is in another part."""

import re
import zlib
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


def beyond_part(items: Iterable[pytest.Item], part: str) -> list[pytest.Item]:
    """Return the long tests that are not in a part of them, such as "2/3": the second third of the files.

    Tests of a file stay together, since they share what was made for them.

    Raises:
        pytest.UsageError: there is no such part.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", part)
    number, parts = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= parts:
        raise pytest.UsageError(f"--long-part={part}: say one of so many parts, such as 2/3, the second of three")
    return [
        item
        for item in items
        if item.get_closest_marker("long") and zlib.crc32(item.nodeid.partition("::")[0].encode()) % parts != number - 1
    ]
