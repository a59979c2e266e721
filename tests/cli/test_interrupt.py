"""A Ctrl-C that imported code has swallowed is raised all the same."""

import os
import signal
import threading

import pytest

from hocket.cli._interrupt import interrupts_kept


def _swallow():
    """What extension modules do: an error in the code they call is cleared."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
    except KeyboardInterrupt:
        return


def _interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass


def _guarded(action, after):
    with interrupts_kept():
        action()
        after.append("reached")


def test_a_swallowed_interrupt_is_raised_at_the_end():
    after = []
    with pytest.raises(KeyboardInterrupt):
        _guarded(_swallow, after)
    assert after == ["reached"]


def test_one_that_was_not_swallowed_goes_through_and_the_handler_is_given_back():
    before, after = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt):
        _guarded(_interrupt, after)
    assert after == []
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_are_left_alone():
    done = []

    def work():
        with interrupts_kept():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
