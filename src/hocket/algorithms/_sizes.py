"""Ranges of message sizes as text: `<64KiB`, `>=64KiB`, `64KiB-1MiB`, `*`."""

from __future__ import annotations

import re
from typing import Final

from hocket.schedule import ScheduleError

_UNITS: Final = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE: Final = r"([\d.]+)\s*([A-Za-z]*)"
_RANGE: Final = re.compile(rf"(<|<=|>=|>)\s*{_SIZE}|{_SIZE}\s*-\s*{_SIZE}|\*")


def parse_range(text: str) -> tuple[int, int | None]:
    """Reads a range of sizes as bytes `(start, stop)`, the end not included, or None for no end.

    Raises:
        ScheduleError: what is no range, no size, or an empty range.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(f"size range {text!r}; write <64KiB, <=64KiB, >64KiB, >=64KiB, 64KiB-1MiB or *")
    comparison, number, unit, low, low_unit, high, high_unit = match.groups()
    if comparison is None and low is None:
        return 0, None
    if comparison is None:
        start, stop = _nbytes(low, low_unit, text), _nbytes(high, high_unit, text)
    else:
        size = _nbytes(number, unit, text) + (comparison in ("<=", ">"))
        if comparison.startswith(">"):
            return size, None
        start, stop = 0, size
    if start >= stop:
        raise ScheduleError(f"size range {text!r} is empty")
    return start, stop


def _nbytes(number: str, unit: str, text: str) -> int:
    try:
        return round(float(number) * _UNITS[unit.upper()])
    except (KeyError, ValueError):
        raise ScheduleError(f"size {number + unit!r} in {text!r}; write it as 512, 64KiB, 1.5MiB or 10MB") from None


def format_nbytes(nbytes: int) -> str:
    """Writes a size in the largest binary unit that it is a multiple of."""
    for unit in ("GiB", "MiB", "KiB"):
        if nbytes and nbytes % _UNITS[unit.upper()] == 0:
            return f"{nbytes // _UNITS[unit.upper()]}{unit}"
    return f"{nbytes}B"


def format_range(start: int, stop: int | None) -> str:
    """Writes a range so that `parse_range` reads it."""
    if stop is None:
        return f">={format_nbytes(start)}" if start else "*"
    return f"{format_nbytes(start)}-{format_nbytes(stop)}" if start else f"<{format_nbytes(stop)}"


def format_seconds(seconds: float) -> str:
    """Writes a time with three digits."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
