"""Collections of garbage are timed, and signals that come meanwhile are not lost."""

import gc
import os
import signal
import subprocess
import time

import pytest

from hocket.profile._garbage import GarbageClock
from hocket.testing import deadline


class Ended(Exception):
    """What the handler raises."""


def collect(seconds: float) -> None:
    """Do nothing else for so long."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        gc.collect()


def test_collections_are_timed() -> None:
    clock = GarbageClock()
    try:
        assert list(clock.collected()) == []
        times = []
        for generation in (0, 1, 2, 2):
            begin_s = time.perf_counter()
            gc.collect(generation)
            times.append((begin_s, time.perf_counter()))
        found = list(clock.collected())
        for begin_s, end_s in times:  # others may have happened, too
            assert any(begin_s <= one[0] < one[1] <= end_s for one in found)
        assert all(begin_s < end_s for begin_s, end_s in found)
        assert len(found) < 4 + 10
    finally:
        clock.close()
    assert clock._callback not in gc.callbacks


def test_what_a_handler_raises_while_garbage_is_collected_comes_to_the_program() -> None:
    def ended(number: int, frame: object) -> None:
        raise Ended

    before = signal.signal(signal.SIGUSR2, ended)
    others, gc.callbacks[:] = gc.callbacks[:], []  # hypothesis listens, too, in Python
    clock = GarbageClock()
    kept = [[number] for number in range(300_000)]  # each collection takes longer than all else
    sender = subprocess.Popen(["sh", "-c", f"sleep 0.05; kill -USR2 {os.getpid()}"])
    try:
        with pytest.raises(Ended):
            collect(deadline(10))
    finally:
        sender.wait()
        clock.close()
        gc.callbacks[:] = others
        signal.signal(signal.SIGUSR2, before)
    assert kept
