"""Start a program as several ranks on this host, follow it to its end, and say how it ended."""

import contextlib
import io
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from string import Template
from typing import Any, BinaryIO

from hocket import _early
from hocket._limits import quota_cores, usable_cores
from hocket._sweep import JOB_VARIABLE
from hocket.comm import rendezvous

from . import _worker
from ._aggregator import Aggregators
from ._arguments import LaunchArguments, parse_arguments
from ._child import Child
from ._clean import sweep_abandoned
from ._console import Output, Terminal, bytes_of, outputs
from ._facts import switches
from ._failure import (
    ArgumentError,
    JobEnded,
    LaunchError,
    MemoryKills,
    RankFailure,
    describe,
    has_raised,
    in_order,
    read_failure,
    read_left,
    without_left,
)
from ._job import PASSED_ON, SAVED, SAVED_MARK, Job
from ._listener import EndingSignals, FailedRank, Interrupted, JobListener, Streams, time_to_end
from ._local import run_here
from ._merge import Merger, RankStream
from ._run_directory import RUN_VARIABLE, LaunchDirectory, worth_saying

TIMED_OUT = 124  # as timeout(1) says it
_LOOK_S = 1.0  # between two looks at who has come, in a store that all hosts share
_FILES, _FILES_OF_RANK = 40, 9  # that a launcher has open at most: pipes, logs, a descriptor of each process
OUTPUT_CLOSED = 128 + signal.SIGPIPE


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """How a launch ended.

    Attributes:
        outcome: "finished", "failed", "interrupted", "timed-out", "saved" (the ranks were told to end, and have written
            a checkpoint from which the same command goes on), or "output-closed" (nobody read what we print).
        exit_code: 0; 75 if "saved" (0 where HOCKET_SAVED_MARK names a file to be made instead); the first failing
            rank's status, or 128 plus the number of the signal that killed it; 128 plus the number of the signal that
            interrupted the launcher; 124 after the time-out; 141 if nobody reads.
        nproc: Ranks on this host.
        wall_s: Seconds from the call to the end.
        restarts: How often the ranks were started again.
        failures: The ranks that failed in the last attempt, the first one first.
        run_dir: Directory of the run; None if it has none.
    """

    outcome: str
    exit_code: int
    nproc: int
    wall_s: float
    restarts: int
    failures: tuple[RankFailure, ...] = ()
    run_dir: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return asdict(self)


def launch(
    command: Sequence[str],
    nproc: int,
    *,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    stdout: BinaryIO | None = None,
    stderr: BinaryIO | None = None,
) -> LaunchResult:
    """Run a program as `nproc` ranks on this host, their output merged line by line.

    The ranks find RANK, WORLD_SIZE, MASTER_ADDR and the rest in their environment, as under torchrun. When the call
    returns, none of their processes is left.

    Args:
        command: A script and its arguments; with "-m" among the flags, a module's name and its arguments.
        nproc: How many ranks to start.
        flags: More flags, as `hocket run` and torchrun take them.
        env: What to add to the ranks' environment.
        timeout_s: When to end the ranks, in seconds.
        stdout: Where the ranks' standard output goes; by default to ours.
        stderr: Where their standard error and our reports go; by default to ours.

    Raises:
        ArgumentError: The flags cannot be carried out, or there is no such script.
        LaunchError: With several hosts: they did not find each other.
    """
    more = [item for key, value in (env or {}).items() for item in ("-x", f"{key}={value}")]
    limit = [] if timeout_s is None else ["--timeout", str(timeout_s)]
    return run(parse_arguments(["-n", str(nproc), *limit, *more, *flags, "--", *command]), stdout, stderr)


def run(arguments: LaunchArguments, stdout: BinaryIO | None = None, stderr: BinaryIO | None = None) -> LaunchResult:
    """Carry out a command line; see `launch`."""
    if arguments.fabric is not None and arguments.placement is None:
        raise ArgumentError("--fabric is for the command `hocket run`, which enters the fabric first; start that")
    begin_s = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    _allow_files(len(arguments.hosts) or arguments.nproc)
    directory = _open_directory(arguments)
    stdout, stderr = stdout or bytes_of(sys.stdout), stderr or bytes_of(sys.stderr)
    if arguments.hosts:
        from ._ssh import run_on_hosts

        with _told(directory):
            outcome, code = run_on_hosts(arguments, stdout, stderr, directory)
        result = LaunchResult(outcome, code, sum(arguments.hosts.values()), time.monotonic() - begin_s, 0)
        return _concluded(result, directory)
    out, err = outputs(stdout, stderr)
    if arguments.as_json:
        out = err
    outcome, code = "finished", 0
    flags = arguments.flags
    if directory is not None and not (str(flags.redirects) == str(flags.tee) == "0"):
        flags.log_dir = flags.log_dir or os.path.join(directory.path, "logs")
    with _told(directory), EndingSignals() as signals, Job() as job, Merger(arguments.grace_s) as merger:
        ours = _RunningJob(arguments, job, merger, out, err, directory)
        signals.pass_on(PASSED_ON, ours.pass_on)
        try:
            for name in sweep_abandoned():
                ours.say(f"removed what job {name} had left, which was killed together with its warden")
            ours.say_threads()
            if arguments.aggregate:
                ours.aggregators = Aggregators(job, arguments.placement)
            command = rank_command(arguments, job.directory)
            if arguments.light:
                signals.let_raise()
                run_here(arguments, command, job.directory, ours)
            else:
                from ._elastic import run_ranks

                signals.let_raise()
                run_ranks(arguments, command, job.directory, ours)
        except Interrupted as interruption:
            outcome, code = "interrupted", 128 + interruption.number
        except KeyboardInterrupt:  # before there were ranks
            outcome, code = "interrupted", 128 + signal.SIGINT
        except JobEnded as ended:
            outcome, code = ended.outcome, ended.exit_code
        finally:
            signals.ignore()
            if outcome in ("finished", "interrupted") and os.path.exists(ours.saved_file):
                outcome, code = "saved", SAVED
                if SAVED_MARK in os.environ:  # srun would kill the launchers that end later than the first that fails
                    open(os.environ[SAVED_MARK], "w").close()
                    code = 0
            ours.explain()
            if outcome == "finished" and not ours.failures:
                ours.say_forked()
            job.end()
    if outcome == "finished" and ours.failures:
        outcome, code = "failed", ours.failures[0].exit_code
    result = LaunchResult(
        outcome, code, arguments.nproc, time.monotonic() - begin_s, ours.restarts, ours.failures if code else ()
    )
    _early.ended(result.exit_code)
    with contextlib.suppress(OSError):  # nobody reads; the exit code says so
        ours.report(result)
    if arguments.placement is not None:
        arguments.placement.close()
    return _concluded(result, directory)


def _allow_files(ranks: int) -> None:
    """Let this process open what so many ranks need, or raise LaunchError: in the middle of the start is too late."""
    needed = _FILES + _FILES_OF_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < needed:  # -1 is no limit
        if 0 <= hard < needed:
            raise LaunchError(
                f"the launcher of {ranks} ranks needs up to {needed} open files, and this process may have {hard}; "
                f"raise that limit (ulimit -n {needed}), or start fewer"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _open_directory(arguments: LaunchArguments) -> LaunchDirectory | None:
    """Make the run's directory, or say why there is none; one that the user has named must be made.

    One host of `--hosts` makes the directory that the job's launcher has made where that is.
    """
    if arguments.run_dir is None:
        return None
    node = 0 if arguments.one_host else int(arguments.flags.node_rank)
    suffix = f"-node{node}" if node or arguments.label else ""
    try:
        new = arguments.one_host and not arguments.run_dir_given and not arguments.label
        shared = not arguments.one_host and str(arguments.flags.rdzv_backend) != "static"  # node ranks come later there
        directory = LaunchDirectory(arguments.run_dir, suffix, new=new, shared=shared)
        directory.began(
            target=arguments.target, arguments=arguments.arguments, environment=arguments.environment,
            nproc=arguments.nproc, hosts=dict(arguments.hosts) or str(arguments.flags.nnodes).removeprefix("1:"),
        )  # fmt: skip
    except OSError as error:
        where = f" on {arguments.label}" if arguments.label else ""
        text = f"no directory for this run can be made{where} at {arguments.run_dir}: {error.strerror}"
        if arguments.run_dir_given:
            raise LaunchError(f"{text}; name another with --run-dir, or give --no-run-dir") from None
        print(f"hocket: {text}; it leaves no logs and no record", file=sys.stderr, flush=True)
        return None
    return directory


@contextlib.contextmanager
def _told(directory: LaunchDirectory | None) -> Iterator[None]:
    """Let the run's directory hear of a launch that fails: without ranks it goes, where it is the launcher's own."""
    try:
        yield
    except BaseException as error:
        if directory is not None:
            directory.never_began(str(error) or type(error).__name__)
        raise


def _concluded(result: LaunchResult, directory: LaunchDirectory | None) -> LaunchResult:
    """Write down how the run ended."""
    if directory is None:
        return result
    result = replace(result, run_dir=directory.path)
    directory.ended(**result.as_json())
    return result


def rank_command(arguments: LaunchArguments, job_directory: str) -> list[str]:
    """Return what each rank starts: our worker, which becomes the user's program."""
    # With logs or tees the traceback must be where the rest of the rank's output is, so that it prints it itself.
    held = str(arguments.flags.redirects) == "0" and str(arguments.flags.tee) == "0"
    python = os.environ.get("PYTHON_EXEC", sys.executable)  # torchrun's variable
    own = [
        python,
        *(switches() if python == sys.executable else []),
        "-u",
        _worker.__file__,
        str(os.getpid()),
        job_directory,
        "held" if held else "shown",
    ]
    return [*own, arguments.kind, arguments.target, *arguments.arguments]


def dry_run(arguments: LaunchArguments) -> dict[str, Any]:
    """Return what `run` would do, as plain values, for `--dry-run`."""
    threads = _rank_threads(arguments)
    flags = arguments.flags
    endpoint = flags.rdzv_endpoint or f"{flags.master_addr}:{flags.master_port}"
    return {
        "command": rank_command(arguments, "JOB_DIRECTORY"),
        "environment": {
            **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
            **_defaults(),
            **arguments.environment,
        },
        "nproc": arguments.nproc,
        "hosts": dict(arguments.hosts) or flags.nnodes,
        "emulated_hosts": _emulated_hosts(arguments),
        "rendezvous": "the job's own directory" if arguments.private else f"{flags.rdzv_backend} at {endpoint}",
        "restarts": flags.max_restarts,
        "timeout_s": arguments.timeout_s,
    }


def _emulated_hosts(arguments: LaunchArguments) -> list[str] | None:
    """Return the host of every rank in the fabric that was asked for."""
    if arguments.fabric is None:
        return None
    from ._fabric import planned

    return list(planned(arguments.fabric, arguments.nproc))


def threads_of_rank(ranks: int) -> int | None:
    """Return OMP_NUM_THREADS for each of a host's ranks: its share of the cores; None if it is set or all are its."""
    cores = usable_cores()  # torch knows those that it may run on, and of no quota
    if "OMP_NUM_THREADS" in os.environ or (ranks == 1 and cores == len(os.sched_getaffinity(0))):
        return None
    return max(1, cores // ranks)


def _defaults() -> dict[str, str]:
    """Return variables that every rank gets unless the user has chosen them.

    Sets of strings have one order in all ranks. Memory comes in huge pages (glibc 2.35, `glibc.malloc.hugetlb`): what a
    step frees goes back to the system and is taken anew in the next, and the kernel clears every page.
    """
    usual = {"PYTHONHASHSEED": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    return {name: value for name, value in usual.items() if name not in os.environ}


def _rank_threads(arguments: LaunchArguments) -> int | None:
    return None if "OMP_NUM_THREADS" in arguments.environment else threads_of_rank(arguments.nproc)


def _place(environment: Mapping[str, str]) -> str:
    """Return where a rank meets the others; "" where elastic's own store serves them."""
    return environment.get(rendezvous.VARIABLE, "").partition(" ")[2]


class _RunningJob(JobListener):
    """One launch as elastic's agent sees it."""

    def __init__(
        self, arguments: LaunchArguments, job: Job, merger: Merger, out: Output, err: Output,
        directory: LaunchDirectory | None,
    ) -> None:  # fmt: skip
        self.failures: tuple[RankFailure, ...] = ()
        self.restarts = 0
        self.aggregators: Aggregators | None = None
        self.record: str | None = None
        self._arguments = arguments
        self._job = job
        self._merger = merger
        self._directory = directory
        self._attempts = 0
        self._children: list[Child] = []
        self._error_files: dict[int, str] = {}  # by rank
        # When a rank that has raised gets which signal, unless it ends by itself before.
        self._raised: dict[int, tuple[float, signal.Signals]] = {}
        self._world, self._place = 0, ""  # where so many ranks meet
        self._number = 0  # of this host
        self._secret: bytes | None = None
        self._look_s = 0.0  # when to look again which of several hosts' ranks have come
        self.saved_file = os.path.join(job.directory, "saved")
        self._outputs = {"stdout": out, "stderr": err}
        self._began_s, self._kills = time.monotonic(), MemoryKills.now()
        self._deadline_s = None if arguments.timeout_s is None else time.monotonic() + arguments.timeout_s

    def say(self, *lines: str, style: str = "bold") -> None:
        err = self._outputs["stderr"]
        label = f"hocket ({self._arguments.label}): " if self._arguments.label else "hocket: "
        if self._directory is not None:
            self._directory.note(lines)
        err.lines(err.styled(label, style), [line.encode(errors="replace") for line in lines])

    def explain(self) -> None:
        """Say what stands out in the ranks' records; one of several hosts says it, or the launcher that started all."""
        if self.record is not None and self._number == 0 and not (self._directory and self._arguments.label):
            for sentence in worth_saying(self.record):
                self.say(sentence)

    def say_forked(self) -> None:
        """Say which processes of the ranks end with them, and would have gone on: a training that is a daemon, say."""
        for pid, rank in sorted(self._job.forked().items()):
            self.say(
                f"rank {rank} ended, exit status 0, and process {pid}, which it had forked, still ran: it is ended, "
                "for a job is over when its ranks are; let the rank itself train, not a process that it leaves behind",
                style="bold red",
            )

    @property
    def _first(self) -> bool:
        return self._arguments.one_host or int(self._arguments.flags.node_rank) == 0

    def say_threads(self) -> None:
        threads = _rank_threads(self._arguments)
        if threads is not None:
            cores, present = quota_cores(), len(os.sched_getaffinity(0))
            quota = f"a quota of {cores:.3g} of " if cores is not None and cores < present else ""
            ranks = f"each of {self._arguments.nproc} ranks" if self._arguments.nproc > 1 else "the rank"
            self.say(
                f"OMP_NUM_THREADS={threads} in {ranks} ({quota}{present} core{'s' * (present != 1)}); set it to choose"
            )

    def report(self, result: LaunchResult) -> None:
        if result.outcome == "failed":
            if result.failures:
                self._describe(result.failures)
            self.say(f"failed, exit status {result.exit_code}", style="bold red")
        elif result.outcome != "finished":
            self.say(f"{result.outcome} after {result.wall_s:.1f} s, exit status {result.exit_code}", style="bold red")
        own = not self._arguments.run_dir_given and not self._arguments.label  # that of --hosts says where itself
        if self._directory is not None and own and not self._directory.joined:
            self.say(self._directory.kept())

    def _describe(self, failures: Sequence[RankFailure]) -> None:
        began_s = time.time() - (time.monotonic() - self._began_s)  # by the clock as it is now: it may have been set
        title, *lines = describe(failures, began_s, self._kills)
        self.say(title, style="bold red")
        self._outputs["stderr"].lines(b"", [line.encode(errors="replace") for line in lines])
        if self._directory is not None:
            self._directory.note(lines)

    def route(self, destinations: Streams, environments: dict[int, dict[str, str]]) -> None:
        threads = _rank_threads(self._arguments)
        if self._directory is not None and self._attempts and self._first:
            self._directory.keep_record()
        self._attempts += 1
        for local_rank, environment in environments.items():
            environment[JOB_VARIABLE] = self._job.name
            self._error_files[int(environment["RANK"])] = environment["TORCHELASTIC_ERROR_FILE"]
            environment.update(_defaults())
            environment["HOCKET_SAVED_FILE"] = self.saved_file
            if threads is not None:
                environment["OMP_NUM_THREADS"] = str(threads)
            self._world, self._place = int(environment["WORLD_SIZE"]), _place(environment)
            self._number = int(environment["GROUP_RANK"])
            if (secret := environment.get(rendezvous.SECRET_FILE_VARIABLE)) is not None:
                self._secret = rendezvous.read_secret(secret)
            placement, rank = self._arguments.placement, int(environment["RANK"])
            if placement is not None:
                environment.update(placement.environment(rank))
            if self.aggregators is not None:
                environment.update(self.aggregators.environment(None if placement is None else placement.hosts[rank]))
            if self._directory is not None:
                environment[RUN_VARIABLE] = self._directory.path
            if "HOCKET_RECORD" not in os.environ:  # for what hangs, and for `explain`
                self.record = environment["HOCKET_RECORD"] = (
                    self._directory.record
                    if self._directory is not None
                    else os.path.join(self._job.directory, f"record-{self._attempts}")
                )
            environment.update(self._arguments.environment)
            self._route_streams(local_rank, environment, destinations)

    def _route_streams(self, local_rank: int, environment: dict[str, str], destinations: Streams) -> None:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        text = self._prefix_text(rank, world, local_rank)
        drawn: str | None = None
        for name, paths, tees, matches in (
            ("stdout", destinations.stdouts, destinations.tee_stdouts, destinations.filtered_stdout),
            ("stderr", destinations.stderrs, destinations.tee_stderrs, destinations.filtered_stderr),
        ):
            tee = tees.pop(local_rank, None)
            if paths[local_rank] and tee is None:  # to a log file or nowhere, and not to the console
                continue
            output = self._outputs[name]
            stream = RankStream(output, output.rank_prefix(text, rank))
            if tee is not None:
                stream.logs.append(self._merger.log_file(io.FileIO(tee, "a")))
                filters = getattr(self._arguments.flags, f"duplicate_{name}_filters")
                stream.needles = tuple(map(os.fsencode, filters))
                stream.matches = self._merger.log_file(io.FileIO(matches, "a")) if stream.needles else None
            if self._directory is not None:
                file = self._directory.open(f"rank-{rank}.{name.removeprefix('std')}")
                stream.logs.append(self._merger.log_file(file))
            if not isinstance(output, Terminal) or local_rank != 0 or tee is not None:
                paths[local_rank] = self._merger.pipe(stream)
            elif drawn is not None and self._outputs["stdout"] is output:
                paths[local_rank] = drawn  # one terminal for both, as the program expects of a terminal
            else:
                paths[local_rank] = drawn = self._merger.terminal(stream, output, len(text))

    def _prefix_text(self, rank: int, world: int, local_rank: int) -> str:
        flags = self._arguments.flags
        template = getattr(flags, "log_line_prefix_template", None) or os.environ.get(
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
        )
        if template:
            return Template(template).safe_substitute(role_name=flags.role, rank=rank, local_rank=local_rank)
        return f"[{rank:{len(str(world - 1))}}] " if world > 1 else ""

    def started(self, attempt: int, ranks: list[Child]) -> None:
        self.restarts = attempt
        self.failures, self._raised = (), {}
        self._began_s, self._kills = time.monotonic(), MemoryKills.now()
        self._children = ranks
        for child in self._children:
            self._job.add_rank(child.pid)
        self._merger.close_ends()
        self._merger.watch(self._children)

    def pass_on(self, number: int) -> None:
        with contextlib.suppress(OSError):  # a full disk; ranks that have begun to listen hear of it all the same
            open(f"{self.saved_file}.told", "w").close()
        for pid in (child.pid for child in self._children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def check(self) -> None:
        if self._merger.broken is not None:
            raise self._merger.broken
        if self._merger.log_error is not None:
            self.say(f"a log file ends here: {self._merger.log_error}", style="bold red")
            self._merger.log_error = None
        if self._merger.output_closed:
            with contextlib.suppress(OSError):
                self.say(f"what the ranks print cannot be written: {self._merger.output_closed.strerror}")
            raise JobEnded("output-closed", OUTPUT_CLOSED)
        for sentence in self.aggregators.revive() if self.aggregators else ():
            self.say(sentence)
        if self._deadline_s is not None and time.monotonic() > self._deadline_s:
            raise JobEnded("timed-out", TIMED_OUT)
        self._check_all_come()
        self._end_raised()

    def _end_raised(self) -> None:
        """End ranks that have raised and do not end: Python waits for their threads, and other ranks for them."""
        now_s = time.monotonic()
        for child in self._children:
            if child.rank in self._merger.ended_s or not has_raised(self._error_files[child.rank]):
                continue
            due_s, number = self._raised.setdefault(child.rank, (now_s + self._arguments.grace_s, signal.SIGTERM))
            if now_s >= due_s:
                self._raised[child.rank] = now_s + self._arguments.grace_s, signal.SIGKILL
                self.say(
                    f"rank {child.rank} has failed and does not end by itself: a thread or an exit function still "
                    f"runs; it gets {number.name}"
                )
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, number)

    def _check_all_come(self) -> None:
        """End the job if a rank has ended well and never joined the group for which others wait."""
        gone = {child.rank for child in self._children if child.rank in self._merger.ended_s}
        here = len(self._children) == self._world  # whether all ranks are on this host
        if not gone or here and len(gone) == self._world or not self._place or time.monotonic() < self._look_s:
            return
        self._look_s = time.monotonic() + (0.0 if here else _LOOK_S)
        came = rendezvous.came(self._place, self._world, self._secret)
        left = [c.rank for c in self._children if c.rank in gone - came and c.status(patient=False) == 0]
        if left and came - gone:
            which, waiting = (", ".join(map(str, sorted(ranks))) for ranks in (left, came - gone))
            self.say(
                f"rank {which} ended, exit status 0, and has not joined the group for which rank {waiting} waits: all "
                "ranks must come to hocket.distribute, hocket.Trainer or init_process_group",
                style="bold red",
            )
            raise JobEnded("failed", 1)

    def failed(self, failures: list[FailedRank], restarts_left: int) -> None:
        self._merger.settle()
        ended_s = dict(self._merger.ended_s)
        faults = os.path.join(self._job.directory, "fault-")
        read = [read_failure(one, ended_s.get(one.rank, time.time()), f"{faults}{one.pid}") for one in failures]
        failed = {one.rank for one in failures}
        told = {child.rank: read_left(f"{self._job.directory}/left-{child.pid}") for child in self._children}
        read, over = without_left(read, {rank: one for rank, one in told.items() if one})
        left = {
            child.rank: (ended_s[child.rank], (told[child.rank] or (0.0, None))[1])
            for child in self._children
            if child.rank in ended_s and child.rank not in failed
        }
        self.failures = in_order(read, self._arguments.grace_s, {**left, **over})
        if restarts_left > 0:
            self._describe(self.failures)
            allowed = self._arguments.flags.max_restarts
            self.say(f"starting all ranks again: restart {allowed - restarts_left + 1} of {allowed}")

    def ending(self, number: signal.Signals, grace_s: int) -> None:
        self.say(time_to_end(number, grace_s))
