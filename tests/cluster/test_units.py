"""Quantities are read as written, and written so that they are read back exactly."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket import cluster


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (cluster.parse_rate, "25 GB/s", 25e9),
        (cluster.parse_rate, "100 Gbit/s", 12.5e9),
        (cluster.parse_rate, "100Gbps", 12.5e9),
        (cluster.parse_rate, "1 GiB/s", 2.0**30),
        (cluster.parse_rate, 12.5, 12.5),
        (cluster.parse_time, "1.5 us", 1.5e-6),
        (cluster.parse_time, "20ms", 0.02),
        (cluster.parse_time, "0 s", 0.0),
        (cluster.parse_bytes, "16 GiB", 16 * 2**30),
        (cluster.parse_bytes, "1 kB", 1000),
        (cluster.parse_bytes, "256", 256),
        (cluster.parse_flops, "15.7 TFLOP/s", 15.7e12),
    ],
)
def test_quantities_are_read_as_people_write_them(
    parse: Callable[[str | float], float], text: str | float, value: float
) -> None:
    assert parse(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("parse", "text", "told"),
    [
        (cluster.parse_rate, "25 GB", "its unit 'GB' is not one"),
        (cluster.parse_rate, "fast", "'fast' is no rate"),
        (cluster.parse_rate, "-1 GB/s", "not negative"),
        (cluster.parse_time, "1.5 light-years", 'write "1.5 us"'),
        (cluster.parse_bytes, "0.3 B", "write whole bytes"),
        (cluster.parse_bytes, True, "is no number of bytes"),
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
    assert cluster.parse_rate(cluster.format_rate(value)) == value
    assert cluster.parse_time(cluster.format_time(value)) == value
    assert cluster.parse_flops(cluster.format_flops(value)) == value


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**50))
def test_bytes_survive_being_written(nbytes: int) -> None:
    assert cluster.parse_bytes(cluster.format_bytes(nbytes)) == nbytes


def test_quantities_are_written_shortly() -> None:
    assert cluster.format_rate(12.5e9) == "12.5 GB/s"
    assert cluster.format_time(1.5e-6) == "1.5 us"
    assert cluster.format_bytes(16 * 2**30) == "16 GiB"
