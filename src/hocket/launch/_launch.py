"""Start a program as several ranks on this host, follow it to its end, and say how it ended."""

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

from hocket import _early

from . import _worker
from ._aggregator import Aggregators
from ._arguments import LaunchArguments, parse_arguments
from ._clean import sweep_abandoned
from ._console import bytes_of, outputs
from ._facts import switches
from ._failure import (
    ArgumentError,
    JobEnded,
    LaunchError,
)
from ._job import PASSED_ON, SAVED, SAVED_MARK, Job
from ._listener import EndingSignals, Interrupted
from ._local import run_here
from ._merge import Merger
from ._rank_environment import defaults, rank_threads
from ._result import LaunchResult
from ._run_directory import LaunchDirectory
from ._running_job import RunningJob

_FILES, _FILES_OF_RANK = 40, 9  # that a launcher has open at most: pipes, logs, a descriptor of each process


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
        ours = RunningJob(arguments, job, merger, out, err, directory)
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
    threads = rank_threads(arguments)
    flags = arguments.flags
    endpoint = flags.rdzv_endpoint or f"{flags.master_addr}:{flags.master_port}"
    return {
        "command": rank_command(arguments, "JOB_DIRECTORY"),
        "environment": {
            **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
            **defaults(),
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
