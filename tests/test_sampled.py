"""The cases that `make test` takes of a test, that the long tests take the others, and that these have parts."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .sampled import beyond_part, sample

_TEST = """
import pytest

@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", "abcde")
def test_some(case):
    pass
"""


@given(st.integers(1, 60), st.integers(1, 60))
def test_a_sample_has_its_size_and_begins_with_the_first(count: int, size: int) -> None:
    found = sample(count, size)
    assert len(found) == min(size, count)
    assert found <= set(range(count))
    assert 0 in found
    assert size == 1 or count - 1 in found


@pytest.mark.parametrize(("marks", "expected"), [("not long", "ae"), ("long", "bcd"), ("", "abcde")])
def test_each_case_runs_in_one_of_the_two(marks: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "test_here.py").write_text(_TEST)
    (tmp_path / "conftest.py").write_text(
        f"""
import sys
import pytest
sys.path.insert(0, {str(Path(__file__).parent)!r})
from sampled import beyond_samples

def pytest_configure(config):
    config.addinivalue_line("markers", "sampled(n): some")
    config.addinivalue_line("markers", "long: others")

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in beyond_samples(items):
        item.add_marker("long")
"""
    )
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marks, "-p", "no:cacheprovider", "."]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=True).stdout
    assert [line.partition("[")[2][:1] for line in out.splitlines() if "::" in line] == list(expected)


class Item:
    """As much of a test as `beyond_part` looks at."""

    def __init__(self, nodeid: str, *, long: bool) -> None:
        self.nodeid, self.long = nodeid, long

    def get_closest_marker(self, name: str) -> bool:
        return name == "long" and self.long


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans())), st.integers(1, 5))
def test_each_long_test_is_in_one_part_with_those_of_its_file(tests: list[tuple[int, int, bool]], parts: int) -> None:
    items: Any = [Item(f"tests/test_{file}.py::test_{name}", long=long) for file, name, long in tests]
    without = [beyond_part(items, f"{number}/{parts}") for number in range(1, parts + 1)]
    for item in items:
        absent = [number for number, others in enumerate(without) if item in others]
        assert len(absent) == (parts - 1 if item.long else 0)
        of_its_file = [other for other in items if other.long and other.nodeid[:13] == item.nodeid[:13]]
        assert all(other in without[number] for number in absent for other in of_its_file)


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "", "x/3", "1/0"])
def test_a_part_that_there_is_not_is_refused(part: str) -> None:
    with pytest.raises(pytest.UsageError, match="say one of so many parts, such as 2/3"):
        beyond_part([], part)
