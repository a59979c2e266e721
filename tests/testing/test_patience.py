import time

import pytest

from hocket.testing import _patience, deadline, patience, run_ranks


def test_patience_by_hand(monkeypatch):
    monkeypatch.setenv("HOCKET_TEST_PATIENCE", "2.5")
    assert patience() == 2.5
    assert deadline(4) == 10.0
    monkeypatch.setenv("HOCKET_TEST_PATIENCE", "0.1")
    assert patience() == 1.0


@pytest.fixture
def measured(monkeypatch):
    """Let `patience` measure anew, what is given."""
    monkeypatch.delenv("HOCKET_TEST_PATIENCE", raising=False)
    monkeypatch.setattr(_patience, "_measured", None)

    def given(spin_s=0.0, wanting=()):
        monkeypatch.setattr(_patience, "_spin", lambda: spin_s)
        monkeypatch.setattr(_patience, "_wanting", lambda: list(wanting))
        monkeypatch.setattr(_patience.os, "cpu_count", lambda: 4)

    return given


@pytest.mark.parametrize(
    ("spin", "wanting", "factor"), [(1, (), 1), (0.5, (1, 2), 1), (3, (8,), 3), (1, (8, 20), 5), (99, (), 32)]
)
def test_patience_is_the_worst_of_what_is_measured(measured, spin, wanting, factor):
    measured(spin * _patience._LOOPS_S, wanting)
    assert patience() == pytest.approx(factor)


def test_patience_grows_at_once_and_falls_slowly(measured, monkeypatch):
    now_s = time.monotonic()
    factors = []
    for number, load in enumerate((4, 40, 4, 4)):
        measured(wanting=[load])
        monkeypatch.setattr(_patience.time, "monotonic", lambda when_s=now_s + 6 * number: when_s)
        factors.append(patience())
    assert factors == pytest.approx([1, 10, 8, 6.4])
    measured(wanting=[100])
    assert patience() == pytest.approx(6.4)  # it is asked of the machine every 5 seconds


def test_the_machine_is_measured():
    _patience._measured = None
    assert 1 <= patience() <= 32


def _patience_there():
    return patience()


def test_ranks_have_the_patience_of_who_started_them(monkeypatch):
    monkeypatch.setenv("HOCKET_TEST_PATIENCE", "7.5")
    assert run_ranks(_patience_there, 2, backend=None) == [7.5, 7.5]
