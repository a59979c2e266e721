"""Old objects are set aside for as long as a block takes, unless somebody else has done so for longer."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from hocket.parallel.compose import _garbage, old_objects_set_aside


@pytest.fixture(autouse=True)
def nothing_set_aside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a program that has not called `gc.freeze()`, and in which none of ours has run."""
    monkeypatch.setattr(_garbage, "_by_others", False)
    gc.unfreeze()
    yield
    gc.freeze()


def test_a_block_sets_objects_aside_and_a_block_inside_it_changes_nothing() -> None:
    for _ in range(2):
        with old_objects_set_aside():
            assert gc.get_freeze_count() > 0
            with old_objects_set_aside():
                pass
            assert gc.get_freeze_count() > 0, "they are set aside until the outer block ends"
        assert gc.get_freeze_count() == 0


def test_an_error_gives_them_back() -> None:
    with pytest.raises(ArithmeticError), old_objects_set_aside():
        raise ArithmeticError
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_has_set_aside_stays_so_and_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.freeze()
    counts: list[int] = []
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(count()) or counts[-1])
    for _ in range(3):
        with old_objects_set_aside():
            pass
        assert count() > 0
    assert len(counts) == 1
