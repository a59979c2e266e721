"""Stacks of other threads."""

import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hocket.profile import _stacks


@pytest.mark.parametrize("name", ["plain.py", "a line 3 in b.py", "Fuß ☃ 😀.py", 'quote".py'])
def test_a_stack_is_read_with_files_of_any_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("def wait(event):\n    event.wait(30)\n\n\ndef go(event):\n    wait(event)\n")
    spec = importlib.util.spec_from_file_location("program", tmp_path / name)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    event = threading.Event()
    thread = threading.Thread(target=program.go, args=(event,))
    thread.start()
    reader = _stacks.StackReader(thread.ident or 0)
    try:
        mine = [f"{tmp_path / name}:2 wait", f"{tmp_path / name}:6 go"]
        give_up_s = time.monotonic() + 20
        stack: list[str] = []
        while time.monotonic() < give_up_s and stack[-5:-3] != mine:  # below it three frames of threading
            stack = reader.read() or stack
            time.sleep(0.01)
        assert stack[-5:-3] == mine
    finally:
        event.set()
        thread.join()
        reader.close()


def test_reading_is_rare_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = _stacks.StackReader(threading.main_thread().ident or 0)
    assert reader.read() is not None  # which sets up what later ones find, and does not put off the next
    assert reader.read() is not None
    assert reader.read() is None
    monkeypatch.setattr(_stacks, "_SHARE", 1e9)
    reader._due_s = 0.0
    assert reader.read() is not None
    assert reader.read() is not None
    reader.close()


def test_a_deep_stack_neither_blocks_nor_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stacks, "_SHARE", 1e9)
    monkeypatch.setattr(_stacks, "_PIPE_NBYTES", 4096)  # as where no more is allowed
    before, every = len(os.listdir("/proc/self/fd")), list[list[str]]()

    def deep(reader: _stacks.StackReader, left: int) -> list[str]:
        return deep(reader, left - 1) if left else reader.read() or []

    def read() -> None:
        reader = _stacks.StackReader(threading.get_ident())
        every.extend(deep(reader, 300) for _ in range(20))
        reader.close()

    # The newest thread's stack is written first: those of threads that others have left may fill so small a pipe.
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert [0 < len(found) <= 40 and found[0].endswith(" deep") for found in every] == [True] * 20
    assert len(os.listdir("/proc/self/fd")) == before


def test_frames_of_the_recorder_amid_a_programs_take_none_of_its_own_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader is called through the recorder; the program's frame inside it is the innermost."""
    monkeypatch.setattr(_stacks, "_OWN", (f"{_stacks.__file__}:", f"{__file__}:{own_line()}"))
    reader = _stacks.StackReader(threading.main_thread().ident or 0)
    found = through_the_recorder(lambda: reader.read() or [])
    reader.close()
    assert found[0].endswith(" <lambda>")
    assert found[1].endswith(" through_the_recorder")


def through_the_recorder(load: Callable[[], list[str]]) -> list[str]:
    return load()


def own_line() -> int:
    return through_the_recorder.__code__.co_firstlineno + 1


def test_no_frame_of_another_thread_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training must not die of its record: main makes and ends frames while another thread reads its stack."""
    monkeypatch.setattr(sys, "_current_frames", None)
    reads = 0
    over = threading.Event()
    reader = _stacks.StackReader(threading.main_thread().ident or 0)

    def read() -> None:
        nonlocal reads
        while not over.is_set():
            reader._due_s = 0.0
            reads += bool(reader.read())

    thread = threading.Thread(target=read)
    thread.start()
    until_s = time.monotonic() + 1
    while time.monotonic() < until_s or reads < 20:
        sorted(range(20), key=lambda n: sum(m for m in range(n)))
    over.set()
    thread.join()
    reader.close()
