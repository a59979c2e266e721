"""Which rank failed first, and what to say about it and the others."""

import errno
import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from hocket._limits import kernel_kills, memory

from ._listener import FailedRank

# A rank that dies without a word is noticed a little after it has died, by a thread that has to be scheduled first;
# its peers may have complained about it by then. A failure that comes by chance within this time is rare.
_NOTICE_S = 0.25
# Two ends within this time may be noticed in either order.
_TOGETHER_S = 0.05


class ArgumentError(ValueError):
    """A command line that cannot be carried out; the message says what to change."""


class LaunchError(RuntimeError):
    """The launch failed before there were ranks that could fail."""


def of_processes(error: OSError) -> str | None:
    """Return what helps where a process could not be started because no more are allowed; None for another error."""
    if error.errno != errno.EAGAIN:
        return None
    return (
        "; this user, or container, may have no more processes: raise that limit (ulimit -u, pids.max), or start fewer"
    )


class JobEnded(Exception):
    """The launcher has ended the job: with which outcome, and with which exit code."""

    def __init__(self, outcome: str, exit_code: int) -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How a rank failed.

    Attributes:
        rank: Its number among all ranks.
        local_rank: Its number on this host.
        pid: Its process.
        exit_code: Exit code as a shell gives it: 1 to 255, and 128 plus the signal's number if a signal ended it.
        signal: The signal's name, if a signal ended it.
        failed_s: When it failed, in seconds since the epoch: when its exception came, or about when it died.
        ended_s: When its end was noticed, in seconds since the epoch.
        error: The exception in one line, if one was recorded.
        traceback: The exception's traceback, or the Python stack at a crash, if there is one.
        ended_by_launcher: It did not fail by itself: it was ended because another had failed.
        stopped: It was stopped (SIGSTOP) when another failed, or for so long that the launcher ended it.
        culprits: The ranks that its error names as late or dead.
        left: Those of them that had ended with status 0, each with the line that ended it, if that is known.
    """

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    signal: str | None
    failed_s: float
    ended_s: float
    error: str | None = None
    traceback: str | None = None
    ended_by_launcher: bool = False
    stopped: bool = False
    culprits: tuple[int, ...] = ()
    left: tuple[tuple[int, str | None], ...] = ()

    def how(self) -> str:
        """Return the end in a few words."""
        return f"killed by {self.signal}" if self.signal else f"exit status {self.exit_code}"


@dataclass(frozen=True, slots=True)
class _Recorded:
    error: str | None
    traceback: str | None
    time_s: float | None
    culprits: tuple[int, ...] = ()


def read_failure(failed: FailedRank, ended_s: float, fault_file: str) -> RankFailure:
    """Return what is known of a rank that has ended badly; a crash wrote the stack to `fault_file`, if it could."""
    recorded, status = _read_error_file(failed.error_file), failed.status
    trace = recorded.traceback
    if recorded.error and status == -signal.SIGTERM:
        status = 1  # its exception was ending it already when we ended all, which another rank's end had us do
    name = None
    if status < 0:
        name = _signal_name(-status)
        trace = trace or _read_fault_file(fault_file)
    failed_s = recorded.time_s if recorded.time_s is not None else ended_s - _NOTICE_S
    code = 128 - status if status < 0 else status
    return RankFailure(
        failed.rank, failed.local_rank, failed.pid, code, name, failed_s, ended_s, recorded.error, trace,
        stopped=failed.stopped, culprits=recorded.culprits,
    )  # fmt: skip


def in_order(
    failures: Sequence[RankFailure], grace_s: float, left: Mapping[int, tuple[float, str | None]]
) -> tuple[RankFailure, ...]:
    """Return failures with the first one first; those that came of our ending the job are marked, and last.

    SIGKILL follows SIGTERM `grace_s` after the first end. `left` says when each rank that ended with status 0
    did, and at which line.
    """
    if not failures:
        return ()
    first_end_s = min(failure.ended_s for failure in failures)
    marked = [
        replace(
            failure,
            ended_by_launcher=_is_ours(failure, failures, first_end_s, grace_s),
            # Who ended later did so because we ended the job.
            left=tuple(
                (rank, left[rank][1]) for rank in failure.culprits if rank in left and left[rank][0] < first_end_s
            ),
        )
        for failure in failures
    ]
    return tuple(sorted(marked, key=lambda failure: (failure.ended_by_launcher, failure.failed_s)))


def _is_ours(failure: RankFailure, failures: Sequence[RankFailure], first_end_s: float, grace_s: float) -> bool:
    """Return whether a rank was ended by us: we signal only after some rank's end, and SIGKILL only after SIGTERM."""
    if failure.error:
        return False
    if failure.signal == "SIGKILL":
        return failure.ended_s > first_end_s + grace_s - _TOGETHER_S
    if failure.signal != "SIGTERM":
        return False
    if failure.ended_s > first_end_s:
        return True
    return any(
        other.signal != "SIGTERM" and other.failed_s < failure.ended_s and other.ended_s < failure.ended_s + _TOGETHER_S
        for other in failures
    )


@dataclass(frozen=True, slots=True)
class MemoryKills:
    """How often the kernel has killed for want of memory, as its counters say at one moment; None if it does not."""

    group: int | None = None  # of this process's control group
    machine: int | None = None

    @classmethod
    def now(cls) -> Self:
        return cls(*kernel_kills())

    def since(self, killed: bool) -> str | None:
        """Return what has come of want of memory since that moment; `killed` says whether a rank's SIGKILL is sought.

        Other users' processes count for the machine, hence only where such an end is to be explained.
        """
        now = MemoryKills.now()
        if self.group is not None and now.group is not None and now.group > self.group:
            number = now.group - self.group
            processes = f"{number} processes" if number > 1 else "one process"
            return (
                f"The kernel killed {processes} here for want of memory: the control group of this job may have "
                f"{memory()[0] / 2**30:.1f} GiB. Let it have more, start fewer ranks on this host, or take smaller "
                "batches."
            )
        if not killed:
            return None
        if self.machine is None or now.machine is None:
            return "SIGKILL without a word is often the kernel running out of memory; `dmesg` tells."
        if now.machine > self.machine:
            return (
                "SIGKILL without a word: on this machine the kernel has killed for want of memory meanwhile; `dmesg` "
                "tells whom. Start fewer ranks on this host, or take smaller batches."
            )
        return (
            "SIGKILL without a word, and not from the kernel, which has killed nothing for want of memory meanwhile: "
            "somebody sent it, or a scheduler or a guard of memory (systemd-oomd, Slurm, Kubernetes)."
        )


def describe(failures: Sequence[RankFailure], began_s: float, kills: MemoryKills = MemoryKills()) -> list[str]:
    """Return the lines for people: the first failure in full, then one line for each other, or for those we ended.

    Args:
        failures: Failures as `in_order` gives them.
        began_s: When the ranks were started, in seconds since the epoch.
        kills: What the kernel's counters said then.
    """
    first, *others = failures
    alike = _alike(failures)
    after_s = max(0.0, (first.failed_s if first.error else first.ended_s) - began_s)
    lines = [_headline(failures, f"{first.how()}, {after_s:.1f} s after the start")]
    if first.traceback:
        lines += first.traceback.rstrip("\n").split("\n")
    elif first.error:
        lines.append(first.error)
    elif first.stopped:
        lines.append("`kill -CONT PROCESS` lets a stopped rank go on in time; HOCKET_TIMEOUT=SECONDS gives it longer.")
    elif not first.signal:
        lines.append("It recorded no exception; what it printed is above.")
    if of_memory := kills.since(killed=len(lines) == 1 and first.signal == "SIGKILL"):
        lines.append(of_memory)
    for other in others:
        if not other.ended_by_launcher and other.rank not in alike:
            reason = f": {other.error.splitlines()[0]}" if other.error else ""
            later_s = max(0.0, other.failed_s - first.failed_s)
            lines.append(f"rank {other.rank} failed {later_s:.1f} s later, {other.how()}{reason}")
    for name in sorted({other.signal for other in others if other.ended_by_launcher and other.signal}):
        ranks = sorted(other.rank for other in others if other.ended_by_launcher and other.signal == name)
        which = f"ranks {', '.join(map(str, ranks))} were" if len(ranks) > 1 else f"rank {ranks[0]} was"
        lines.append(f"{which} ended because of that ({name})")
    if any(failure.left for failure in failures):
        lines.append("All ranks take the same steps: look for an exit, or a shorter loop, that not all of them reach.")
        lines.append("A loop that ends by a loss or a metric (early stopping) is to go by hocket.average of it.")
    return lines


def _headline(failures: Sequence[RankFailure], how: str) -> str:
    """Return who is to blame: ranks that were stopped, or that others waited for in vain, else who failed first."""
    first = failures[0]
    by_rank = {failure.rank: failure for failure in failures}
    stopped = sorted(failure.rank for failure in failures if failure.stopped)
    named = {rank for failure in failures for rank in failure.culprits}
    # Who complained itself only passed on what it suffered; who is not among the failures runs on another host.
    silent = sorted(rank for rank in named if rank not in by_rank or by_rank[rank].ended_by_launcher)
    if stopped:
        which = ", ".join(f"{rank} (process {by_rank[rank].pid})" for rank in stopped)
        were = "were" if len(stopped) > 1 else "was"
        if first.stopped:
            return f"rank{_s(stopped)} {which} {were} stopped (SIGSTOP) for longer than HOCKET_TIMEOUT allows: {how}"
        return f"rank{_s(stopped)} {which} {were} stopped (SIGSTOP); rank {first.rank} gave up first: {how}"
    if left := dict(sorted(pair for failure in failures for pair in failure.left)):
        which = ", ".join(f"{rank} ({place})" if place else f"{rank}" for rank, place in left.items())
        ended = f"rank{_s(list(left))} {which} ended with status 0 while others still trained"
        return f"{ended}; rank {first.rank} waited in vain: {how}"
    if silent:
        which = ", ".join(map(str, silent))
        return f"rank{_s(silent)} {which} did not come where others waited; rank {first.rank} gave up first: {how}"
    if alike := _alike(failures):
        return f"ranks {', '.join(map(str, alike))} failed with the same error: {how}"
    return f"rank {first.rank} failed first: {how}"


def _alike(failures: Sequence[RankFailure]) -> list[int]:
    """Return the ranks that failed by themselves, if they are several and all say the same; else none."""
    own = [failure for failure in failures if not failure.ended_by_launcher]
    said = {failure.error and re.sub(r"\brank \d+", "rank", failure.error) for failure in own}
    return sorted(failure.rank for failure in own) if len(own) > 1 and len(said) == 1 and None not in said else []


def _s(ranks: Sequence[int]) -> str:
    return "s" if len(ranks) > 1 else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read_error_file(path: str) -> _Recorded:
    """Read what our worker, or torch's @record in a program of its own, has written."""
    try:
        message = json.loads(Path(path).read_text())["message"]
        if isinstance(message, str):
            return _Recorded(message, None, None)
        extra = message["extraInfo"]
        time_s = float(extra.get("timestamp_s", extra["timestamp"]))
        culprits = tuple(int(rank) for rank in extra.get("culprits", ()))
        return _Recorded(str(message["message"]), str(extra["py_callstack"]), time_s, culprits)
    except (OSError, ValueError, KeyError, TypeError):
        return _Recorded(None, None, None)


def has_raised(error_file: str) -> bool:
    """Return whether an exception has ended a rank's program: our worker says when, torch's @record may be inside."""
    try:
        return "timestamp_s" in json.loads(Path(error_file).read_text())["message"]["extraInfo"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_left(path: str) -> tuple[float, str | None] | None:
    """Return when, in seconds since the epoch, and at which line a rank's program has ended well, if it has told."""
    try:
        time_s, _, place = Path(path).read_text().partition(" ")
        return float(time_s), place or None
    except (OSError, ValueError):
        return None


def without_left(
    failures: Sequence[RankFailure], told: Mapping[int, tuple[float, str | None]]
) -> tuple[list[RankFailure], dict[int, tuple[float, str | None]]]:
    """Return failures without the ranks that had left, and those ranks with what they have `told` (`read_left`).

    A rank's program may be over, so that others wait for it in vain, while its process still ends; then our SIGTERM
    for all meets it. Its program was over before the others raised, which no program that heeds SIGTERM is.
    """
    raised_s = min((one.failed_s for one in failures if one.error), default=0.0)
    named = {rank for one in failures for rank in one.culprits}
    left = {
        one.rank: told[one.rank]
        for one in failures
        if one.signal and not one.error and one.rank in named and told.get(one.rank, (raised_s,))[0] < raised_s
    }
    return [one for one in failures if one.rank not in left], left


def _read_fault_file(path: str) -> str | None:
    """Return the Python stacks at a crash, without the frames of our worker."""
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return None
    own = f'File "{Path(__file__).with_name("_worker.py")}"'
    return "\n".join(line for line in lines if own not in line).strip() or None
