"""The one place that knows torch.distributed.elastic: an agent that starts the ranks, watches and restarts them.

Beside torch's public names it overrides the hooks that elastic documents for agents of one's own (`_start_workers`,
`_monitor_workers`, `_shutdown`; https://docs.pytorch.org/docs/stable/elastic/agent.html) and reads `_pcontext`.
"""

import argparse
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args

from hocket.comm import torch_adapter

from ._arguments import LaunchArguments
from ._child import Child
from ._failure import ArgumentError, LaunchError
from ._job import PASSED_ON, blocked
from ._listener import FailedRank, Interrupted, JobListener, Notices, StoppedRanks, to_handle
from ._meeting import Meeting, meet, not_met

_LOOK_S = 0.1
_SILENT_S = 10.0  # while hosts meet, before the user hears what is waited for


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
    # The launcher that has started the others by ssh knows who is missing.
    say = (lambda text: None) if arguments.one_host or arguments.label else listener.say
    where, all_hosts = repr(config.rdzv_endpoint), "start the same command on all hosts"
    late = threading.Timer(
        _SILENT_S, say, [f"no launcher answers at {where} yet; {all_hosts}, and let firewalls pass that port"]
    )
    with _running(late):
        meeting = meet(config, log_directory, one_host=arguments.one_host)
    late = threading.Timer(_SILENT_S, say, [f"not all hosts have come to {where} yet; {all_hosts}"])
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
        spec,
        _RoutedLogs(config.logs_specs, listener, meeting, late.cancel),
        config.start_method,
        listener,
        arguments.grace_s,
        arguments.operation_timeout_s,
    )
    close_rendezvous = True
    try:
        with (
            _running(late),
            _environment_restored(
                TORCHELASTIC_SIGNALS_TO_HANDLE=",".join(to_handle(config.signals_to_handle)),
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # elastic's store for the ranks, which asks nobody who he is
            ),
        ):
            agent.run()
    except (RendezvousError, torch_adapter.DistNetworkError, torch_adapter.DistStoreError) as error:
        raise not_met(config, error, again=agent.has_begun) from error
    except socket.gaierror as error:  # elastic looks for a free port there, on the host of rank 0
        raise LaunchError(
            f"'localhost' does not resolve on this host ({error.strerror}), which torch needs where hosts meet by "
            f'--rdzv-backend {config.rdzv_backend}; add "127.0.0.1 localhost" to /etc/hosts, or '
            "say --master-addr and --node-rank instead"
        ) from error
    except SignalException as error:
        # A rendezvous that other hosts share stays open for them, as with torchrun.
        close_rendezvous = arguments.one_host
        raise Interrupted(error.sigval) from None
    finally:
        if close_rendezvous and not agent.waits_for_others:
            meeting.handler.shutdown()
        meeting.close()


def launch_config(arguments: LaunchArguments, log_directory: str) -> LaunchConfig:
    """Let torchrun read its own flags. Raises ArgumentError: a flag's value is wrong."""
    flags = arguments.flags
    flags.log_dir = flags.log_dir or log_directory
    flags.training_script, flags.training_script_args = arguments.target, list(arguments.arguments)
    # It would set the number of threads to 1 for all to see; what we choose goes to the ranks only.
    with _environment_restored(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1")):
        try:
            _check(flags, arguments.nproc)
            config: LaunchConfig = config_from_args(flags)[0]
            if config.rdzv_backend in ("static", "c10d"):
                _, port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=-1)
                if port == 0 and not arguments.one_host:
                    raise ValueError(f"{config.rdzv_endpoint}: name the port at which the hosts meet")
            number, hosts = config.rdzv_configs.get("rank", 0), config.max_nodes
            if not 0 <= number < hosts:
                raise ValueError(f"--node-rank {number}: the numbers of {hosts} hosts are 0 to {hosts - 1}")
            if not config.monitor_interval > 0:
                raise ValueError(f"--monitor-interval {config.monitor_interval}: give a number of seconds above 0")
        except (AssertionError, OSError, RuntimeError, ValueError) as error:
            raise ArgumentError(str(error)) from error
    return config


def _check(flags: argparse.Namespace, nproc: int) -> None:
    """Raise ValueError for what torchrun would take, or refuse in words that do not name the flag."""
    fewest, _, most = flags.nnodes.partition(":")
    if not re.fullmatch(r"\d+(:\d+)?", flags.nnodes) or not 1 <= int(fewest) <= int(most or fewest):
        raise ValueError(f"--nnodes {flags.nnodes}: give a number of hosts, or the fewest and the most as 2:4")
    if flags.max_restarts < 0:
        raise ValueError(f"--max-restarts {flags.max_restarts}: give 0 or more")
    for name, text in ("redirects", flags.redirects), ("tee", flags.tee):
        if not re.fullmatch(r"[0-3]|(\d+:[0-3],)*\d+:[0-3]", text):
            raise ValueError(
                f"--{name} {text}: give 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), or one of them for local "
                "ranks as 0:1,1:3"
            )
    for word in filter(None, flags.local_ranks_filter.split(",")):
        if not word.strip().isdecimal() or int(word) >= nproc:
            raise ValueError(f"--local-ranks-filter {flags.local_ranks_filter}: give local ranks, 0 to {nproc - 1}")
    for name in flags.signals_to_handle.split(","):
        if name.strip() not in signal.Signals.__members__:
            raise ValueError(f"--signals-to-handle: there is no signal {name!r} here; SIGTERM is one, say")
    try:
        get_logging_handler(flags.event_log_handler)
    except KeyError:
        raise ValueError(
            f"--event-log-handler {flags.event_log_handler}: torch has no such handler; null and console are two"
        ) from None
    if flags.numa_binding is not None and not torch.cuda.is_available():
        raise ValueError(f"--numa-binding {flags.numa_binding}: torch binds by GPUs, and finds none on this host")


@contextmanager
def _running(late: threading.Timer) -> Iterator[None]:
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


class _RoutedLogs(LogsSpecs):
    """The log files that torchrun's flags ask for; the listener then says what else becomes of the streams."""

    def __init__(self, inner: LogsSpecs, listener: JobListener, meeting: Meeting, met: Callable[[], None]) -> None:
        super().__init__()
        self._met = met  # what to call when all hosts have
        self._inner = inner
        self._listener = listener
        self._meeting = meeting

    @property
    def root_log_dir(self) -> str:
        return self._inner.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self._met()
        destinations = self._inner.reify(envs)
        for environment in envs.values():
            environment.update(self._meeting.environment(environment))
        self._listener.route(destinations, envs)
        return destinations


class _Agent(LocalElasticAgent):
    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str,
        listener: JobListener,
        grace_s: int,
        timeout_s: float | None,
    ) -> None:
        super().__init__(spec, logs_specs, start_method=start_method, shutdown_timeout=grace_s)
        self._listener = listener
        self._grace_s = grace_s
        self._interrupted = False
        self._notices = Notices()
        self._stopped = StoppedRanks(timeout_s)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with blocked([PASSED_ON, signal.SIGINT]):  # a rank lets them come once it can mind them
            started: dict[int, Any] = super()._start_workers(worker_group)
        self._hear_once()
        context: Any = self._pcontext
        processes = {number: handler.proc for number, handler in context.subprocess_handlers.items()}
        ranks = [Child(one.global_rank, processes[one.local_rank]) for one in worker_group.workers]
        self._listener.started(worker_group.spec.max_restarts - self._remaining_restarts, ranks)
        return started

    def _hear_once(self) -> None:
        """Keep from elastic's handlers, which it has just set, what is no new signal."""
        if threading.current_thread() is not threading.main_thread():
            return
        for name in to_handle(os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"]):
            if callable(handler := signal.getsignal(getattr(signal, name.strip()))):
                signal.signal(getattr(signal, name.strip()), partial(self._hear, handler))

    def _hear(self, handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None) -> None:
        if self._notices.are_new(number):
            handler(number, frame)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._listener.check()
        context: Any = self._pcontext
        self._stopped.look([handler.proc for handler in context.subprocess_handlers.values()])
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            failures = [
                FailedRank(rank, one.local_rank, one.pid, one.exitcode, one.error_file, one.pid in self._stopped.pids)
                for rank, one in result.failures.items()
            ]
            self._listener.failed(failures, self._remaining_restarts)
        return result

    def _exit_barrier(self) -> None:
        """Look around while the other hosts' ranks have not ended."""
        waiting = threading.Thread(target=super()._exit_barrier, name="hocket-exit-barrier", daemon=True)
        waiting.start()
        while waiting.is_alive():
            self._listener.check()
            waiting.join(_LOOK_S)

    @property
    def has_begun(self) -> bool:
        """Whether ranks have been started: all hosts had met."""
        return self._pcontext is not None

    @property
    def waits_for_others(self) -> bool:
        """Whether a thread has the store while it waits for other hosts' ranks to end."""
        return bool(self._in_exit_barrier)

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: int | None = None) -> None:
        if self._interrupted:  # and again, while the ranks had time to end: now they have none
            super()._shutdown(signal.SIGKILL, self._grace_s)
            return
        if death_sig is not None:  # only for a signal that has come; the other calls name none
            self._interrupted = True
            self._listener.ending(death_sig, self._grace_s)
        super()._shutdown(death_sig or signal.SIGTERM, self._grace_s)


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
