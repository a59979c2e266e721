"""Ranges of message sizes as text: `<64KiB`, `>=64KiB`, `64KiB-1MiB`, `*`."""

import re
from typing import Final

from hocket.schedule import ScheduleError
from hocket.units import format_bytes, parse_bytes

_SIZE: Final = r"([\d.]+\s*[A-Za-z]*)"
_RANGE: Final = re.compile(rf"(<|<=|>=|>)\s*{_SIZE}|{_SIZE}\s*-\s*{_SIZE}|\*")


def parse_range(text: str) -> tuple[int, int | None]:
    """Read a range of sizes as bytes `(start, stop)`, the end not included, or None for no end.

    Raises:
        ScheduleError: what is no range, no size, or an empty range.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(f"size range {text!r}; write <64KiB, <=64KiB, >64KiB, >=64KiB, 64KiB-1MiB or *")
    comparison, size, low, high = match.groups()
    if comparison is None and low is None:
        return 0, None
    if comparison is None:
        start, stop = _nbytes(low, text), _nbytes(high, text)
    else:
        edge = _nbytes(size, text) + (comparison in ("<=", ">"))
        if comparison.startswith(">"):
            return edge, None
        start, stop = 0, edge
    if start >= stop:
        raise ScheduleError(f"size range {text!r} is empty")
    return start, stop


def _nbytes(size: str, text: str) -> int:
    try:
        return parse_bytes(size)
    except ValueError:
        raise ScheduleError(f"size {size!r} in {text!r}; write it as 512, 64KiB, 1.5MiB or 10MB") from None


def format_size(nbytes: int) -> str:
    """Return a size as ranges hold it, without a blank: "64KiB"."""
    return format_bytes(nbytes).replace(" ", "")


def format_range(start: int, stop: int | None) -> str:
    """Write a range so that `parse_range` reads it."""
    if stop is None:
        return f">={format_size(start)}" if start else "*"
    return f"{format_size(start)}-{format_size(stop)}" if start else f"<{format_size(stop)}"
