"""The ranks of a job that has one host and no restarts: started and watched without torch.

What torch.distributed.elastic does beyond that, several hosts and restarts among it, is left to it (`_elastic.py`); but
loading it takes longer than all else between `hocket run` and a rank's first step. The ranks find the same variables.
"""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import starmap
from types import FrameType

from hocket.comm import rendezvous

from ._arguments import LaunchArguments
from ._child import Child
from ._facts import free_port
from ._failure import LaunchError, of_processes
from ._job import PASSED_ON, blocked
from ._listener import FailedRank, Interrupted, JobListener, Notices, StoppedRanks, to_handle

_INTERVAL_S = 0.1  # torchrun's --monitor-interval


@dataclass(slots=True)
class _Console:
    """See `Streams`: to the console, unless the listener changes it."""

    stdouts: dict[int, str]
    stderrs: dict[int, str]
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""


def run_here(arguments: LaunchArguments, command: list[str], directory: str, listener: JobListener) -> None:
    """Run a command as all ranks of a job, until they have ended or one has failed.

    In `directory`, which is the job's, ranks meet and write their errors.

    Raises:
        LaunchError: A rank cannot be started.
        Interrupted: A signal came.
        Exception: What the listener's `check` raised.
    """
    environments = _environments(arguments, directory)
    streams = _Console(dict.fromkeys(environments, ""), dict.fromkeys(environments, ""))
    listener.route(streams, environments)
    processes: list[subprocess.Popen[bytes]] = []
    stopped = StoppedRanks(arguments.operation_timeout_s)
    try:
        _raise_signals()
        with blocked([PASSED_ON, signal.SIGINT]):  # a rank lets them come once it can mind them
            for rank, environment in environments.items():
                try:
                    processes.append(_start(command, environment, (streams.stdouts[rank], streams.stderrs[rank])))
                except OSError as error:
                    text = f"rank {rank} of {len(environments)} cannot be started: {error}"
                    raise LaunchError(f"{text}{of_processes(error) or ''}") from None
        listener.started(0, list(starmap(Child, enumerate(processes))))
        while not any(statuses := [process.poll() for process in processes]) and None in statuses:
            time.sleep(_INTERVAL_S)
            listener.check()
            stopped.look(processes)
        stopped.look(processes)
        _end(processes, signal.SIGTERM, arguments.grace_s)
    except Interrupted as interruption:
        listener.ending(interruption.number, arguments.grace_s)
        _end(processes, interruption.number, arguments.grace_s)
        raise
    except BaseException:
        _end(processes, signal.SIGTERM, arguments.grace_s)
        raise
    failed = [
        FailedRank(
            rank, rank, process.pid, process.returncode, _error_file(directory, rank), process.pid in stopped.pids
        )
        for rank, process in enumerate(processes)
        if process.returncode
    ]
    if failed:
        listener.failed(failed, 0)


def _environments(arguments: LaunchArguments, directory: str) -> dict[int, dict[str, str]]:
    """Return what each rank's environment has, by rank: what elastic gives it."""
    port = free_port()
    address, size = arguments.flags.local_addr or "localhost", str(arguments.nproc)
    common = {
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": size, "WORLD_SIZE": size,
        "ROLE_NAME": arguments.flags.role, "ROLE_WORLD_SIZE": size,
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": str(uuid.uuid4()),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **rendezvous.environment(address, port, os.path.join(directory, "rendezvous-0")),
    }  # fmt: skip
    return {
        rank: {
            **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank),
            "TORCHELASTIC_ERROR_FILE": _error_file(directory, rank),
        }
        for rank in range(arguments.nproc)
    }  # fmt: skip


def _error_file(directory: str, rank: int) -> str:
    return os.path.join(directory, f"error-{rank}.json")


def _start(command: Sequence[str], environment: Mapping[str, str], paths: Sequence[str]) -> subprocess.Popen[bytes]:
    with ExitStack() as opened:
        stdout, stderr = (opened.enter_context(open(path, "wb", 0)) if path else None for path in paths)
        both = {**os.environ, **environment}
        return subprocess.Popen(command, env=both, stdout=stdout, stderr=stderr, start_new_session=True)


def _end(processes: Sequence[subprocess.Popen[bytes]], number: int, grace_s: float) -> None:
    """Send a signal to those that still run, and SIGKILL to what is left after `grace_s`; no wait is without an end."""
    deadline_s = time.monotonic() + grace_s
    try:
        _signal(processes, number)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
    finally:  # a second signal raises Interrupted in the wait
        _signal(processes, signal.SIGKILL)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):  # not even SIGKILL ends an uninterruptible sleep in the kernel
                process.wait(max(1.0, grace_s))


def _signal(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def _raise_signals() -> None:
    """From here on raise Interrupted when an ending signal comes; `EndingSignals` gives back the handlers."""
    notices = Notices()

    def interrupt(number: int, frame: FrameType | None) -> None:
        del frame
        if notices.are_new(number):
            raise Interrupted(signal.Signals(number))

    for name in to_handle("SIGTERM,SIGINT,SIGHUP,SIGQUIT"):
        with suppress(ValueError):  # not the main thread, which alone may set handlers
            signal.signal(getattr(signal, name), interrupt)
