"""Worker processes of loaders outlive the signals by which a job is told to end, until their rank has saved."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from multiprocessing import parent_process, resource_tracker
from multiprocessing.sharedctypes import RawValue
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader


def opened(loader: Iterable[Any]) -> Iterator[Any]:
    """Return `iter(loader)`, whose workers are spared the signals that this rank handles itself, to save, say.

    Launchers send them to the rank's whole group of processes, and srun to all of a job: a worker would end by it, and
    the rank with an error, before it has saved. What comes while a worker starts is kept from it until it can tell.
    """
    handled = [number for number in (signal.SIGTERM, signal.SIGUSR1) if callable(signal.getsignal(number))]
    if not handled or not isinstance(loader, DataLoader) or not loader.num_workers:
        return iter(loader)
    then, context = loader.worker_init_fn, loader.multiprocessing_context
    if (context or multiprocessing).get_start_method() != "fork":
        resource_tracker.ensure_running()  # its start would unblock signals
        loader.multiprocessing_context = "spawn"  # nothing would spare a fork server
    loader.worker_init_fn = partial(_begin_worker, then, _ending())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, handled)  # workers inherit it
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        loader.worker_init_fn, loader.multiprocessing_context = then, context


def _begin_worker(then: Callable[[int], Any] | None, ending: Any, worker: int) -> None:
    """Heed a signal only when the rank ends: multiprocessing then ends workers by SIGTERM, and waits for them."""
    parent = parent_process()

    def heed(number: int, frame: FrameType | None) -> None:
        if ending.value or parent is None or not parent.is_alive():
            os._exit(0)

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for number in blocked:
        signal.signal(number, heed)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    if then is not None:
        then(worker)


@cache
def _ending() -> Any:
    """Return what all processes share that this one starts: whether this one ends."""
    ending, own = RawValue("b"), os.getpid()

    def tell() -> None:
        ending.value = os.getpid() == own or ending.value  # a process that was forked also runs this

    atexit.register(tell)  # before the exit function of multiprocessing, which was registered before
    return ending
