"""Quantities as people write them, "100 Gbit/s", and as code holds them: bytes, seconds, bytes per second.

Prefixes are SI's powers of 1000, or IEC's of 1024 (Ki, Mi, ...); a bit is `bit` or `b`, a byte `B`.
"""

import re
from collections.abc import Mapping

__all__ = [
    "format_bytes",
    "format_flops",
    "format_rate",
    "format_time",
    "parse_bytes",
    "parse_flops",
    "parse_rate",
    "parse_time",
]

_PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
    "Pi": 2.0**50,
}
_BYTES = {f"{prefix}B": factor for prefix, factor in _PREFIXES.items()}
_BITS = {f"{prefix}{unit}": factor / 8 for prefix, factor in _PREFIXES.items() for unit in ("bit", "b")}
_RATES = {f"{unit}/s": factor for unit, factor in (_BYTES | _BITS).items()} | {
    f"{unit}ps": factor for unit, factor in (_BYTES | _BITS).items()
}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_FLOPS = {f"{prefix}{unit}": factor for prefix, factor in _PREFIXES.items() for unit in ("FLOP/s", "FLOPS")}

_QUANTITY = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*")


def _parse(value: str | float, units: Mapping[str, float], what: str, examples: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        number, unit = float(value), ""
    else:
        match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError(f"{value!r} is no {what}; write {examples}")
        number, unit = float(match.group(1)), match.group(2)
    if unit and unit not in units:
        raise ValueError(f"{value!r} is no {what}: its unit {unit!r} is not one; write {examples}")
    result = number * (units[unit] if unit else 1.0)
    if not 0 <= result < float("inf"):
        raise ValueError(f"{value!r} is no {what}: it must be finite and not negative")
    return result


def parse_rate(value: str | float) -> float:
    """Bytes per second of "25 GB/s", "100 Gbit/s", or of a number, which is bytes per second.

    Raises:
        ValueError: saying what was found and how it is written.
    """
    return _parse(value, _RATES, "rate", '"25 GB/s" or "100 Gbit/s"')


def parse_time(value: str | float) -> float:
    """Seconds of "1.5 us", or of a number, which is seconds.

    Raises:
        ValueError: saying what was found and how it is written.
    """
    return _parse(value, _TIMES, "time", '"1.5 us" or "20 ms"')


def parse_bytes(value: str | float) -> int:
    """Bytes of "16 GiB", or of a number, which is bytes.

    Raises:
        ValueError: saying what was found and how it is written, also of a part of a byte.
    """
    nbytes = _parse(value, _BYTES, "number of bytes", '"16 GiB" or "256 B"')
    if nbytes != int(nbytes):
        raise ValueError(f"{value!r} is {nbytes} bytes; write whole bytes")
    return int(nbytes)


def parse_flops(value: str | float) -> float:
    """Floating-point operations per second of "15.7 TFLOP/s", or of a number.

    Raises:
        ValueError: saying what was found and how it is written.
    """
    return _parse(value, _FLOPS, "compute rate", '"15.7 TFLOP/s"')


def _format(number: float, steps: list[tuple[float, str]]) -> str:
    """The number in the largest unit that leaves at least 1; exact: parsing gives the same number back."""
    factor, unit = next((step for step in steps if abs(number) >= step[0]), steps[-1])
    short = f"{number / factor:.6g}"
    # Readable if that loses nothing; else every digit, and where even that rounds, the plain number.
    for text in (short, repr(number / factor)):
        if float(text) * factor == number:
            return f"{text} {unit}"
    base = steps[-1] if steps[-1][0] <= 1 else (1.0, "")
    return f"{number!r} {base[1]}" if base[0] == 1.0 else f"{number!r} s"


def format_rate(rate_Bps: float) -> str:
    """A rate as `parse_rate` reads it back exactly, as in "12.5 GB/s"."""
    return _format(float(rate_Bps), [(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")])


def format_time(time_s: float) -> str:
    """A time as `parse_time` reads it back exactly, as in "1.5 us"."""
    if time_s == 0:
        return "0 s"
    return _format(float(time_s), [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")])


def format_bytes(nbytes: int) -> str:
    """A number of bytes as `parse_bytes` reads it back exactly, as in "16 GiB"."""
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and nbytes % 2**exponent == 0:
            return f"{nbytes >> exponent} {unit}"
    return f"{nbytes} B"


def format_flops(rate: float) -> str:
    """A compute rate as `parse_flops` reads it back exactly, as in "15.7 TFLOP/s"."""
    return _format(float(rate), [(1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1.0, "FLOP/s")])
