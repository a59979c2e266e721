"""Quantities are read as written, and written so that they are read back exactly."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket import units


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_rate, "25 GB/s", 25e9),
        (units.parse_rate, "100 Gbit/s", 12.5e9),
        (units.parse_rate, "100Gbps", 12.5e9),
        (units.parse_rate, "1 GiB/s", 2.0**30),
        (units.parse_rate, 12.5, 12.5),
        (units.parse_time, "1.5 us", 1.5e-6),
        (units.parse_time, "20ms", 0.02),
        (units.parse_time, "0 s", 0.0),
        (units.parse_bytes, "16 GiB", 16 * 2**30),
        (units.parse_bytes, "1 kB", 1000),
        (units.parse_bytes, "256", 256),
        (units.parse_bytes, "64kib", 65536),
        (units.parse_bytes, "0.3MiB", 314573),
        (units.parse_flops, "15.7 TFLOP/s", 15.7e12),
    ],
)
def test_quantities_are_read_as_people_write_them(
    parse: Callable[[str | float], float], text: str | float, value: float
) -> None:
    assert parse(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("parse", "text", "told"),
    [
        (units.parse_rate, "25 GB", "its unit 'GB' is not one"),
        (units.parse_rate, "fast", "'fast' is no rate"),
        (units.parse_rate, "-1 GB/s", "not negative"),
        (units.parse_time, "1.5 light-years", 'write "1.5 us"'),
        (units.parse_bytes, "0.3 B", "write whole bytes"),
        (units.parse_bytes, True, "is no number of bytes"),
    ],
)
def test_what_is_no_quantity_is_refused_with_an_example(
    parse: Callable[[str | float], float], text: str, told: str
) -> None:
    with pytest.raises(ValueError, match="is") as refused:
        parse(text)
    assert told in str(refused.value)


@settings(deadline=None, max_examples=200)
@given(st.floats(1e-12, 1e18))
def test_rates_times_and_compute_rates_survive_being_written(value: float) -> None:
    assert units.parse_rate(units.format_rate(value)) == value
    assert units.parse_time(units.format_time(value)) == value
    assert units.parse_flops(units.format_flops(value)) == value


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**50))
def test_bytes_survive_being_written(nbytes: int) -> None:
    assert units.parse_bytes(units.format_bytes(nbytes)) == nbytes


def test_quantities_are_written_shortly() -> None:
    assert units.format_rate(12.5e9) == "12.5 GB/s"
    assert units.format_rate(12.3456789e9, 4) == "12.35 GB/s"
    assert units.format_rate(0, 4) == "0 B/s"
    assert units.format_flops(15.6789e12, 3) == "15.7 TFLOP/s"
    assert units.format_flops(5.21e7, 2) == "52 MFLOP/s"
    assert units.format_time(1.5e-6) == "1.5 us"
    assert units.format_bytes(16 * 2**30) == "16 GiB"
    assert units.format_bytes(57.2123 * 2**30, 3) == "57.2 GiB"
    assert units.format_bytes(2000 * 2**40, 3) == "2,000 TiB"
    assert units.format_bytes(0.4, 3) == "0 B"
    assert units.format_bytes(-202_927_104, 3) == "-194 MiB"
    assert units.format_time(0.0123456, 3) == "12.3 ms"
    assert units.format_time(3e-10, 3) == "0.3 ns"
    assert units.format_time(1500, 4) == "1500 s"
    assert units.format_time(3600.5, 3) == "3600 s"
    assert units.format_time(0.9999, 3) == "1 s"
    assert units.format_time(-0.0123456, 3) == "-12.3 ms"
