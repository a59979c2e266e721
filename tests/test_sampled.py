"""The cases that `make test` takes of a test, and that the long tests take the others."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .sampled import sample

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
