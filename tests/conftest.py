import gc
import os
import signal
import threading
import time

import pytest
import pytest_timeout

from .sampled import beyond_part, beyond_samples

gc.disable()  # until all tests are collected: what is imported stays, and looking through it takes seconds
os.environ.setdefault("HOCKET_CALIBRATION", "off")  # nothing is kept in the home of who runs the tests
# Keras asks whether there is a GPU when it is imported: in the way that torch has else, the fork server could give its
# children none any more.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("HOCKET_RUN_DIR", "off")  # no `hocket run` of a test leaves a directory in the checkout
_STARTING = {"run_ranks", "subprocess", "run", "fabric", "launch"}  # names in a file, or its folder


def pytest_addoption(parser):
    parser.addoption("--golden-update", action="store_true", help="write what the golden transcripts' commands print")
    parser.addoption("--long-part", default="1/1", help="of the long tests, only this part of so many, such as 2/3")


def pytest_configure(config):
    # A shell without job control starts what it puts in the background with SIGINT ignored, which children inherit: the
    # tests that interrupt a launcher would wait for ever. A handler, unlike "ignore", is not inherited.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # xdist's controller, which starts the workers after this and runs no test: they need not wait for torch
    import hypothesis
    import torch

    from hocket._last_garbage import leave_out_last_collection
    from hocket.testing import preload

    leave_out_last_collection()  # or else Triton's, if it is there, would tell of what `gc.freeze` below has set aside
    preload("tests.preload")
    torch.set_num_threads(1)  # small tensors: several threads only wait for each other, for long where cores are busy
    hypothesis.settings.register_profile("calm", deadline=None)
    hypothesis.settings.load_profile("calm")


@pytest.fixture(scope="session")
def hocket_forked():
    """`processes.hocket_forked`; the server that it forks from has begun in no directory of a test."""
    from hocket.testing import run_ranks

    from .processes import hocket_forked

    run_ranks(int, 1, backend=None)
    return hocket_forked


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Leave cases beyond a sample to the long tests, and let files come first that take long.

    None is to begin when the rest is done: torch's own suite, then what starts processes, then the search for plans and
    the rules of operators.
    """
    for item in beyond_samples(items):
        item.add_marker("long")
    if others := beyond_part(items, config.getoption("long_part")):
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]
    result = yield

    def place(item):
        folder = item.path.parent.name
        starts = _STARTING & vars(item.module).keys() or folder in _STARTING
        return folder != "torch_suite", not starts, folder not in ("planner", "sharding")

    items.sort(key=place)
    return result


def pytest_collection_finish():
    gc.freeze()  # modules and tests stay to the end: looking through them takes half a second, in each Trainer too
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item, settings):
    """Stretch a test's limit with the machine; asked again when it is over, since others may have come meanwhile."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None  # as pytest-timeout does it
    from hocket.testing import deadline

    begin_s = time.monotonic()

    def over(signum, frame):
        left_s = begin_s + deadline(settings.timeout) - time.monotonic()
        if left_s > 0:
            signal.setitimer(signal.ITIMER_REAL, left_s)
        else:
            pytest_timeout.timeout_sigalrm(item, settings)

    def cancel():
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True
