"""Runs a function on n real processes that form a process group, with a deadline and the first traceback."""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from . import _patience
from ._patience import deadline, patience

_GRACE_S = 2.0
_preloaded = ["hocket.testing._preload"]


_NOT_BEGUN = (
    "It could not load the function or its arguments, as its own output says: they have to be in a file that ranks can "
    "import, not in a notebook or an interpreter's input, and a script calls run_ranks below `if __name__ == "
    '"__main__":`.'
)


class RankError(RuntimeError):
    """A rank raised, died or did not end in time.

    Attributes:
        rank: Rank that failed; the first to fail.
        traceback: Traceback of the rank, or the stacks of the ranks that had not ended.
    """

    def __init__(self, rank: int, summary: str, traceback: str) -> None:
        super().__init__(f"rank {rank} {summary}\n{traceback}")
        self.rank = rank
        self.traceback = traceback


def preload(*modules: str) -> None:
    """Let the ranks of `run_ranks` start with these modules loaded, so that none of them pays the imports anew.

    Has no effect once the first rank has started. A module that cannot be imported is left to the ranks.

    Args:
        *modules: Absolute names. They may start no threads: those would not survive the fork.
    """
    _preloaded.extend(module for module in modules if module not in _preloaded)


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    backend: str | None = "hocket",
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    expect_death: Collection[int] = (),
    allow_late: Collection[int] = (),
    group_timeout_s: float = 30.0,
) -> list[Any]:
    """Call `fn(*args)` on `n` processes and return their results in the order of ranks.

    Processes fork from a server that has torch loaded, so that a world starts in a fraction of a second. RANK,
    WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_* are set as torchrun sets them, one thread computes.

    Args:
        fn: Function importable by name, as are its arguments and results by pickle.
        n: Number of ranks.
        *args: Arguments passed to every rank.
        backend: Backend of the default process group, set up before and destroyed after `fn`; None for no group.
        timeout_s: Seconds for everything, on an idle machine (see `deadline`); then all ranks are killed.
        env: Further environment variables.
        expect_death: Ranks that `fn` may kill; their results are None.
        allow_late: Ranks that need not end by themselves (stopped ones, say); they are killed at the end.
        group_timeout_s: Time-out of the process group's operations, on an idle machine (see `deadline`).

    Raises:
        RankError: a rank failed; with the traceback of the first.
    """
    from hocket.comm import rendezvous

    # Asking whether there is a GPU must not start CUDA in the server: ranks forked from it could not use one.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    common = {
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "TORCHELASTIC_RESTART_COUNT": "0",
        _patience.VARIABLE: str(patience()),
    }
    with tempfile.TemporaryDirectory(prefix="hocket-test-") as directory:
        common |= {**rendezvous.environment("127.0.0.1", _free_port(), f"{directory}/rendezvous"), **(env or {})}
        readers: list[Connection] = []
        processes = []
        for rank in range(n):
            reader, writer = context.Pipe(duplex=False)
            settings = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(
                target=_rank_main,
                args=(fn, args, settings, backend, deadline(group_timeout_s), writer, str(Path(directory) / str(rank))),
                name=f"rank-{rank}",
            )
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        try:
            needed = {r: reader for r, reader in enumerate(readers) if r not in allow_late}
            return _collect(processes, needed, timeout_s, frozenset(expect_death), directory)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join(deadline(_GRACE_S))
            for reader in readers:
                reader.close()


def _free_port() -> int:
    """Return a port for a store that a rank may want to open; Hocket opens none."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _collect(
    processes: list[Any],
    open_ranks: dict[int, Connection],
    timeout_s: float,
    expect_death: frozenset[int],
    directory: str,
) -> list[Any]:
    results: list[Any] = [None] * len(processes)
    failures: list[tuple[int, str, str]] = []
    begin_s = time.monotonic()
    deadline_s = begin_s + deadline(timeout_s)
    while open_ranks:
        ready = wait(list(open_ranks.values()), max(0.0, deadline_s - time.monotonic()))
        if not ready and (later_s := begin_s + deadline(timeout_s)) > deadline_s + 1.0:
            deadline_s = later_s  # the machine has become slower in the meantime
            continue
        if not ready:
            late = sorted(open_ranks)
            stacks = _stacks(processes, late, directory)
            summary = f"had not ended after {time.monotonic() - begin_s:.0f} s (ranks still running: {late})"
            raise RankError(late[0], summary, "\n".join(f"--- rank {r}\n{s}" for r, s in stacks.items()))
        for rank in [r for r, reader in open_ranks.items() if reader in ready]:
            try:
                failed, value = pickle.loads(open_ranks[rank].recv_bytes())
                if failed:
                    failures.append((rank, "raised", value))
                    # Others fail because this one did; give them a moment, but no longer.
                    deadline_s = min(deadline_s, time.monotonic() + deadline(_GRACE_S))
                else:
                    results[rank] = value
            except EOFError:
                if rank not in expect_death:
                    processes[rank].join(deadline(_GRACE_S))
                    begun = os.path.exists(os.path.join(directory, str(rank)))
                    ending = f"died with exit code {processes[rank].exitcode}"
                    failures.append((rank, ending, "" if begun else _NOT_BEGUN))
                    deadline_s = min(deadline_s, time.monotonic() + deadline(_GRACE_S))
            del open_ranks[rank]
        if failures and time.monotonic() >= deadline_s:
            break
        if failures and open_ranks and not wait(list(open_ranks.values()), max(0.0, deadline_s - time.monotonic())):
            break
    if failures:
        raise RankError(*failures[0])
    return results


def _stacks(processes: list[Any], ranks: list[int], directory: str) -> dict[int, str]:
    for rank in ranks:
        if processes[rank].is_alive():
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(deadline(0.5))
    found = {}
    for rank in ranks:
        path = Path(directory) / str(rank)
        found[rank] = path.read_text() if path.exists() else "(no stack)"
    return found


def _rank_main(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    settings: dict[str, str],
    backend: str | None,
    group_timeout_s: float,
    writer: Connection,
    stack_path: str,
) -> None:
    gc.freeze()  # half a million objects of imported modules, which each collection would visit and copy
    stack_file = open(stack_path, "w")  # noqa: SIM115  (faulthandler writes to it until the process ends)
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
    os.environ.update(settings)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if backend is not None:
            dist.init_process_group(backend, timeout=timedelta(seconds=group_timeout_s))
        value = fn(*args)
        if dist.is_initialized():
            dist.destroy_process_group()
        # Not by Connection.send: there torch passes tensors as file descriptors, which die with this process.
        message = pickle.dumps((False, value))
    except BaseException:
        message = pickle.dumps((True, traceback.format_exc()))
    writer.send_bytes(message)
    writer.close()
