"""A Ctrl-C while torch is imported is raised when that is over, since extension modules lose it or abort."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from hocket.cli.run import interrupts_kept
from hocket.testing import deadline


def _interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass


def _guarded(after):
    with interrupts_kept():
        _interrupt()
        after.append("reached")


def test_an_interrupt_is_raised_at_the_end_and_the_handler_is_given_back():
    before, after = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt):
        _guarded(after)
    assert after == ["reached"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_ends_the_process_at_once():
    source = """
import os, signal
from hocket.cli.run import interrupts_kept
with interrupts_kept():
    os.kill(os.getpid(), signal.SIGINT)
    print("one", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("two", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=deadline(60), check=False
    )
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "one\n"


def test_without_an_interrupt_nothing_is_raised():
    with interrupts_kept():
        pass


def test_other_threads_are_left_alone():
    done = []

    def work():
        with interrupts_kept():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def test_an_interrupt_while_the_command_is_loaded_leaves_no_traceback(tmp_path):
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('went on')")
    command = [sys.executable, "-m", "hocket", "--version"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=deadline(60), check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
