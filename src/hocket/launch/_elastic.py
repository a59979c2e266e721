"""The one place that knows torch.distributed.elastic: an agent that starts the ranks, watches and restarts them.

Beside torch's public names it overrides the hooks that elastic documents for agents of one's own (`_start_workers`,
`_monitor_workers`, `_shutdown`; https://docs.pytorch.org/docs/stable/elastic/agent.html) and reads `_pcontext`.
"""

import contextlib
import logging
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args

from ._arguments import ArgumentError, LaunchArguments
from ._meeting import Meeting, meet, not_met

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class StartedRank:
    """A rank that has just been started; `reaped_status` gives its status once the agent has taken it."""

    rank: int
    local_rank: int
    pid: int
    reaped_status: Callable[[], int | None]


@dataclass(frozen=True, slots=True)
class FailedRank:
    """A rank that has ended badly, as elastic tells it; a negative status is a signal's number."""

    rank: int
    local_rank: int
    pid: int
    status: int
    error_file: str
    stopped: bool = False  # whether it was stopped (SIGSTOP) when another failed


class JobListener(ABC):
    """Who follows a job; called by the agent's thread."""

    @abstractmethod
    def route(self, destinations: LogsDest, environments: dict[int, dict[str, str]]) -> None:
        """Before the ranks start: say where each prints, and add to its environment, by local rank."""

    @abstractmethod
    def started(self, attempt: int, ranks: list[StartedRank]) -> None:
        """Learn that all ranks of an attempt have been started; the first attempt is 0."""

    @abstractmethod
    def check(self) -> None:
        """Look around; called several times a second, and what it raises ends the job."""

    @abstractmethod
    def failed(self, failures: list[FailedRank], restarts_left: int) -> None:
        """Learn that an attempt has failed, and that its ranks have been ended."""

    @abstractmethod
    def ending(self, number: signal.Signals, grace_s: int) -> None:
        """Learn of a signal for the launcher; the ranks get it now, and SIGKILL after `grace_s` seconds."""


class Interrupted(Exception):
    """The launcher was told to end by a signal, which the ranks were then sent."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


def run_ranks(arguments: LaunchArguments, command: list[str], log_directory: str, listener: JobListener) -> None:
    """Run a command as all ranks of this host, until they have ended or failed for good.

    Args:
        arguments: What was asked for.
        command: The program that each rank starts.
        log_directory: Where elastic puts error files, unless `--log-dir` was given.
        listener: Who is told.

    Raises:
        ArgumentError: A flag's value is wrong.
        LaunchError: The hosts did not find each other.
        Interrupted: A signal came.
        Exception: What the listener's `check` raised.
    """
    _quieten()
    config = launch_config(arguments, log_directory)
    address, port = None, None
    if config.rdzv_backend == "static":
        address, port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=-1)
    meeting = meet(config, log_directory, one_host=arguments.one_host)
    assert config.logs_specs is not None
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=command[0],
        # elastic substitutes ${local_rank} in arguments; the program's are to arrive as they were given.
        args=tuple(argument.replace("$", "$$") for argument in command[1:]),
        rdzv_handler=meeting.handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=address,
        master_port=port,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        virtual_local_rank=config.virtual_local_rank,
    )
    agent = _Agent(
        spec, _RoutedLogs(config.logs_specs, listener, meeting), config.start_method, listener, arguments.grace_s
    )
    close_rendezvous = True
    try:
        with _environment_restored(
            TORCHELASTIC_SIGNALS_TO_HANDLE=_not_ignored(config.signals_to_handle),
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # elastic's store for the ranks, which asks nobody who he is
        ):
            agent.run()
    except RendezvousError as error:
        raise not_met(config, error) from error
    except SignalException as error:
        # A rendezvous that other hosts share stays open for them, as with torchrun.
        close_rendezvous = arguments.one_host
        raise Interrupted(error.sigval) from None
    finally:
        if close_rendezvous:
            meeting.handler.shutdown()
        meeting.close()


def _not_ignored(names: str) -> str:
    """Return the signals to handle, less those we were started to ignore (nohup lets a job outlive its terminal)."""
    numbers = {name: getattr(signal, name.strip(), None) for name in names.split(",")}
    return ",".join(
        name for name, number in numbers.items() if number is None or signal.getsignal(number) != signal.SIG_IGN
    )


def launch_config(arguments: LaunchArguments, log_directory: str) -> LaunchConfig:
    """Let torchrun read its own flags. Raises ArgumentError: a flag's value is wrong."""
    flags = arguments.flags
    flags.log_dir = flags.log_dir or log_directory
    flags.training_script, flags.training_script_args = arguments.target, list(arguments.arguments)
    # It would set the number of threads to 1 for all to see; what we choose goes to the ranks only.
    with _environment_restored(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1")):
        try:
            return config_from_args(flags)[0]
        except (AssertionError, RuntimeError, ValueError, NotADirectoryError) as error:
            raise ArgumentError(str(error)) from error


class _RoutedLogs(LogsSpecs):
    """The log files that torchrun's flags ask for; the listener then says what else becomes of the streams."""

    def __init__(self, inner: LogsSpecs, listener: JobListener, meeting: Meeting) -> None:
        super().__init__()
        self._inner = inner
        self._listener = listener
        self._meeting = meeting

    @property
    def root_log_dir(self) -> str:
        return self._inner.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = self._inner.reify(envs)
        for environment in envs.values():
            environment.update(self._meeting.environment(environment))
        self._listener.route(destinations, envs)
        return destinations


class _Agent(LocalElasticAgent):
    def __init__(
        self, spec: WorkerSpec, logs_specs: LogsSpecs, start_method: str, listener: JobListener, grace_s: int
    ) -> None:
        super().__init__(spec, logs_specs, start_method=start_method, shutdown_timeout=grace_s)
        self._listener = listener
        self._grace_s = grace_s
        self._interrupted = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        context: Any = self._pcontext
        ranks = [
            StartedRank(
                worker.global_rank,
                worker.local_rank,
                started[worker.local_rank],
                partial(getattr, context.subprocess_handlers[worker.local_rank].proc, "returncode"),
            )
            for worker in worker_group.workers
        ]
        self._listener.started(worker_group.spec.max_restarts - self._remaining_restarts, ranks)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._listener.check()
        stopped = self._end_stopped()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            failures = [
                FailedRank(
                    rank,
                    failure.local_rank,
                    failure.pid,
                    failure.exitcode,
                    failure.error_file,
                    failure.pid in stopped,
                )
                for rank, failure in result.failures.items()
            ]
            self._listener.failed(failures, self._remaining_restarts)
        return result

    def _end_stopped(self) -> set[int]:
        """Once a rank has failed, end those that are stopped, and return their processes.

        A signal other than SIGKILL reaches a stopped process when it goes on.
        """
        context: Any = self._pcontext
        processes = [handler.proc for handler in context.subprocess_handlers.values()]
        if not any(process.poll() for process in processes):
            return set()
        stopped = {process.pid for process in processes if process.poll() is None and _is_stopped(process.pid)}
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGCONT)
        return stopped

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: int | None = None) -> None:
        if self._interrupted:  # and again, while the ranks had time to end: now they have none
            super()._shutdown(signal.SIGKILL, self._grace_s)
            return
        if death_sig is not None:  # only for a signal that has come; the other calls name none
            self._interrupted = True
            self._listener.ending(death_sig, self._grace_s)
        super()._shutdown(death_sig or signal.SIGTERM, self._grace_s)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _quieten() -> None:
    """We report failures ourselves; elastic's own lines about them remain for who asks by LOGLEVEL."""
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _environment_restored(**variables: str) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


class EndingSignals(AbstractContextManager["EndingSignals"]):
    """Gives back at its end the handlers that elastic replaces; nothing may interrupt the clean-up before that."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "EndingSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in _ENDING}
        return self

    def pass_on(self, number: signal.Signals, send: Callable[[int], None]) -> None:
        """Call `send` when this signal comes, which ends nothing here."""
        if self._before:
            self._before[number] = signal.signal(number, lambda number, _: send(number))

    def ignore(self) -> None:
        """From here on nothing interrupts."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
