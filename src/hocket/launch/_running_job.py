"""One launch as elastic's agent sees it: what each rank is given, what it prints, and what is said when one fails."""

import contextlib
import io
import os
import signal
import time
from collections.abc import Mapping, Sequence
from string import Template

from hocket._limits import quota_cores
from hocket._sweep import JOB_VARIABLE
from hocket.comm import rendezvous

from ._aggregator import Aggregators
from ._arguments import LaunchArguments
from ._child import Child
from ._console import Output, Terminal
from ._failure import (
    JobEnded,
    MemoryKills,
    RankFailure,
    describe,
    has_raised,
    in_order,
    read_failure,
    read_left,
    without_left,
)
from ._job import Job
from ._late import LateRanks
from ._listener import FailedRank, JobListener, Streams, time_to_end
from ._merge import Merger, RankStream
from ._rank_environment import defaults, rank_threads
from ._result import LaunchResult
from ._run_directory import RUN_VARIABLE, LaunchDirectory, worth_saying

TIMED_OUT = 124  # as timeout(1) says it
_LOOK_S = 1.0  # between two looks at who has come, in a store that all hosts share


def _place(environment: Mapping[str, str]) -> str:
    """Return where a rank meets the others; "" where elastic's own store serves them."""
    return environment.get(rendezvous.VARIABLE, "").partition(" ")[2]


class RunningJob(JobListener):
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
        self._late: LateRanks | None = None  # of this attempt
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
        threads = rank_threads(self._arguments)
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
        threads = rank_threads(self._arguments)
        if self._directory is not None and self._attempts and self._first:
            self._directory.keep_record()
        self._attempts += 1
        for local_rank, environment in environments.items():
            environment[JOB_VARIABLE] = self._job.name
            self._error_files[int(environment["RANK"])] = environment["TORCHELASTIC_ERROR_FILE"]
            environment.update(defaults())
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
        # One of several hosts says it: all see who has come.
        self._late = LateRanks(self._place, self._world, self._secret) if self._place and not self._number else None

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
            raise JobEnded(*self._merger.output_ended())
        for sentence in self.aggregators.revive() if self.aggregators else ():
            self.say(sentence)
        if self._deadline_s is not None and time.monotonic() > self._deadline_s:
            raise JobEnded("timed-out", TIMED_OUT)
        self._check_all_come()
        if self._late is not None and (said := self._late.look(self._children)):
            self.say(said)
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
            child.rank: told[child.rank] or (ended_s[child.rank], None)
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
