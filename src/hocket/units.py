"""Quantities as people write them, "100 Gbit/s", and as code holds them: bytes, seconds, bytes per second.

Prefixes are SI's powers of 1000, or IEC's of 1024 (Ki, Mi, ...); a bit is `bit` or `b`, a byte `B`. Sizes in bytes may
be written in any case, as "64kib".
"""

import re
from collections.abc import Mapping
from decimal import Decimal

__all__ = [
    "format_bytes", "format_flops", "format_rate", "format_time", "parse_bytes", "parse_flops", "parse_rate",
    "parse_time",
]  # fmt: skip

# Decimal, so that "500 ns" is 5e-07 to the last bit and is written as it was read.
_PREFIXES = {
    "": Decimal(1),
    "k": Decimal("1e3"),
    "K": Decimal("1e3"),
    "M": Decimal("1e6"),
    "G": Decimal("1e9"),
    "T": Decimal("1e12"),
    "P": Decimal("1e15"),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
}
_BYTES = {f"{prefix}B": factor for prefix, factor in _PREFIXES.items()}
_SIZES = {unit.upper(): factor for unit, factor in _BYTES.items()}  # no bits among them, so that case says nothing
_BITS = {f"{prefix}{unit}": factor / 8 for prefix, factor in _PREFIXES.items() for unit in ("bit", "b")}
_RATES = {f"{unit}/s": factor for unit, factor in (_BYTES | _BITS).items()} | {
    f"{unit}ps": factor for unit, factor in (_BYTES | _BITS).items()
}
_TIMES = {
    "s": Decimal(1),
    "ms": Decimal("1e-3"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "μs": Decimal("1e-6"),
    "ns": Decimal("1e-9"),
    "min": Decimal(60),
    "h": Decimal(3600),
}
_FLOPS = {f"{prefix}{unit}": factor for prefix, factor in _PREFIXES.items() for unit in ("FLOP/s", "FLOPS")}

_QUANTITY = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*")


def _parse(value: str | float, units: Mapping[str, Decimal], what: str, examples: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        number, unit = Decimal(repr(float(value))), ""
    else:
        match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError(f"{value!r} is no {what}; write {examples}")
        number, unit = Decimal(match.group(1)), match.group(2)
    if units is _SIZES:
        unit = unit.upper()
    if unit and unit not in units:
        raise ValueError(f"{value!r} is no {what}: its unit {unit!r} is not one; write {examples}")
    result = float(number * (units[unit] if unit else 1))
    if not 0 <= result < float("inf"):
        raise ValueError(f"{value!r} is no {what}: it must be finite and not negative")
    return result


def parse_rate(value: str | float) -> float:
    """Return bytes per second of "25 GB/s", "100 Gbit/s", or of a number, which is bytes per second.

    Raises:
        ValueError: The value is none; the message says what was found and how one is written.
    """
    return _parse(value, _RATES, "rate", '"25 GB/s" or "100 Gbit/s"')


def parse_time(value: str | float) -> float:
    """Return seconds of "1.5 us", or of a number, which is seconds.

    Raises:
        ValueError: The value is none; the message says what was found and how one is written.
    """
    return _parse(value, _TIMES, "time", '"1.5 us" or "20 ms"')


def parse_bytes(value: str | float) -> int:
    """Return the bytes of "16 GiB", or of a number, which is bytes; "0.3 MiB" is rounded.

    Raises:
        ValueError: What was found is no size, or a part of a byte; the message says how one is written.
    """
    nbytes = _parse(value, _SIZES, "number of bytes", '"16 GiB" or "256 B"')
    if nbytes != int(nbytes) and (nbytes < 1 or not isinstance(value, str) or not re.search("[kmgtp]", value.lower())):
        raise ValueError(f"{value!r} is {nbytes} bytes; write whole bytes")
    return round(nbytes)


def parse_flops(value: str | float) -> float:
    """Return floating-point operations per second of "15.7 TFLOP/s", or of a number.

    Raises:
        ValueError: The value is none; the message says what was found and how one is written.
    """
    return _parse(value, _FLOPS, "compute rate", '"15.7 TFLOP/s"')


def _format(value: float, steps: list[tuple[str, str]], digits: int | None = None) -> str:
    """Return the value in the largest unit that leaves at least 1, with as many digits as reading it back takes."""
    exact = Decimal(repr(float(value)) if digits is None else f"{value:.{digits}g}")
    factor, unit = next(
        ((Decimal(f), u) for f, u in steps if abs(exact) >= Decimal(f)), (Decimal(steps[-1][0]), steps[-1][1])
    )
    return f"{(exact / factor).normalize():f} {unit}"


def format_rate(rate_Bps: float, digits: int | None = None) -> str:
    """Return a rate as `parse_rate` reads it back exactly, as in "12.5 GB/s", or with so many digits at the most."""
    steps = [("1e12", "TB/s"), ("1e9", "GB/s"), ("1e6", "MB/s"), ("1e3", "kB/s"), ("1", "B/s")]
    return _format(float(rate_Bps), steps, digits)


def format_time(time_s: float, digits: int | None = None) -> str:
    """Return a time as `parse_time` reads it back exactly, as "1.5 us", or with so many digits at the most."""
    if time_s == 0:
        return "0 s"
    return _format(float(time_s), [("1", "s"), ("1e-3", "ms"), ("1e-6", "us"), ("1e-9", "ns")], digits)


def format_bytes(nbytes: float, digits: int | None = None) -> str:
    """Return a number of bytes as `parse_bytes` reads it back exactly, as "16 GiB", or with so many digits.

    Args:
        nbytes: Whole, unless digits are given.
        digits: How many of them to show at the most, as in "57.2 GiB"; whole numbers are shown whole.
    """
    steps = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    if digits is None:
        whole = int(nbytes)
        factor, unit = next(((f, u) for f, u in steps if whole and whole % f == 0), (1, "B"))
        return f"{whole // factor} {unit}"
    factor, unit = next(((f, u) for f, u in steps if abs(nbytes) >= f), (1, "B"))
    value = nbytes / factor
    return f"{value:,.0f} {unit}" if abs(value) >= 10**digits or factor == 1 else f"{value:.{digits}g} {unit}"


def format_flops(rate: float, digits: int | None = None) -> str:
    """Return a compute rate as `parse_flops` reads it back exactly, as in "15.7 TFLOP/s", or with so many digits."""
    units = [("1e15", "PFLOP/s"), ("1e12", "TFLOP/s"), ("1e9", "GFLOP/s"), ("1e6", "MFLOP/s"), ("1", "FLOP/s")]
    return _format(float(rate), units, digits)
