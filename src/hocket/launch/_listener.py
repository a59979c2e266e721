"""Who follows the ranks of this host, what is told to him, and which signals he hears; without torch."""

import contextlib
import math
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from subprocess import Popen
from types import FrameType
from typing import Any, Protocol

from hocket import _early
from hocket._sweep import stat_of

from ._child import Child

_LOOK_S = 1.0  # between two looks for stopped ranks
_COMPLAIN_S = 5.0  # for ranks that wait for a stopped one to say so themselves: they know the operation
_SAME_S = 5.0  # in which a signal that comes again is the same notice still
_SAME_KEY_S = 0.2  # of SIGINT: who presses Ctrl-C twice means it, and takes longer
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_TO_RAISE = (signal.SIGTERM, signal.SIGHUP)  # before there are ranks


class Streams(Protocol):
    """Where the ranks of this host print, by local rank: files, for who listens to change; elastic's `LogsDest`."""

    stdouts: dict[int, str]
    stderrs: dict[int, str]
    tee_stdouts: dict[int, str]
    tee_stderrs: dict[int, str]
    filtered_stdout: str
    filtered_stderr: str


@dataclass(frozen=True, slots=True)
class FailedRank:
    """A rank that has ended badly, as elastic tells it; a negative status is a signal's number."""

    rank: int
    local_rank: int
    pid: int
    status: int
    error_file: str  # where an exception was recorded, if any was
    stopped: bool = False  # whether it was stopped (SIGSTOP) when another failed, or was ended because of that


class JobListener(ABC):
    """Who follows a job; called by the agent's thread."""

    @abstractmethod
    def say(self, *lines: str) -> None:
        """Tell the user; also called by another thread."""

    @abstractmethod
    def route(self, destinations: "Streams", environments: dict[int, dict[str, str]]) -> None:
        """Before the ranks start: say where each prints, and add to its environment, by local rank."""

    @abstractmethod
    def started(self, attempt: int, ranks: list[Child]) -> None:
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


class Notices:
    """Tells signals that come once more on purpose from those that one sender has sent twice.

    At a time limit Slurm signals all processes of a step, and so does its srun when it is told the same; timeout(1)
    signals the process that it has started, and then its group.
    """

    def __init__(self) -> None:
        self._noted_s: dict[int, float] = {}  # when each signal was last taken for new

    def are_new(self, number: int) -> bool:
        """Return whether a signal that has come now is no repetition of one that has just come."""
        now_s = time.monotonic()
        same_s = _SAME_KEY_S if number == signal.SIGINT else _SAME_S
        if now_s < self._noted_s.get(number, -math.inf) + same_s:
            return False
        self._noted_s[number] = now_s
        return True


def time_to_end(number: signal.Signals, grace_s: float) -> str:
    """Return what is said of a signal that ends the ranks."""
    later = "" if number == signal.SIGINT else f" after {_SAME_S:.0f} s"
    return f"{number.name}: the ranks have {grace_s} s to end; once more{later} ends them at once"


class StoppedRanks:
    """The ranks of this host that are stopped (SIGSTOP): named when another fails, and ended if they stay so.

    Others notice a stopped rank when an operation passes its time-out. But while ranks start they wait for minutes,
    because one may import longer than another; that it is stopped only the launcher can tell.
    """

    def __init__(self, timeout_s: float | None) -> None:
        """Watch ranks; `timeout_s` is HOCKET_TIMEOUT, None: nobody is ended before another has failed."""
        self.pids: set[int] = set()  # those that were stopped when a rank failed or was ended
        self._allowed_s = math.inf if timeout_s is None else timeout_s + _COMPLAIN_S
        self._stopped_s: dict[int, float] = {}
        self._looked_s = time.monotonic()

    def look(self, processes: Sequence[Popen[Any]]) -> None:
        """End ranks that are stopped: all once a rank has failed, before that who is so for longer than allowed."""
        failed = any(process.poll() for process in processes)
        if not failed and (self._allowed_s == math.inf or time.monotonic() < self._looked_s + _LOOK_S):
            return
        # What passes while the launcher is itself stopped, as a scheduler does with a whole job, does not count.
        passed_s = min(time.monotonic() - self._looked_s, 2 * _LOOK_S)
        self._looked_s = time.monotonic()
        stopped = {process.pid for process in processes if process.poll() is None and stat_of(process.pid)[:1] == ["T"]}
        self._stopped_s = {pid: self._stopped_s.get(pid, -passed_s) + passed_s for pid in stopped}
        for pid in stopped:
            if failed or self._stopped_s[pid] > self._allowed_s:
                self.pids.add(pid)
                with contextlib.suppress(ProcessLookupError):  # SIGTERM reaches a stopped process when it goes on
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGCONT)


def to_handle(names: str) -> list[str]:
    """Return the signals to handle, less those we were started to ignore (nohup lets a job outlive its terminal)."""
    numbers = {name: getattr(signal, name.strip(), None) for name in names.split(",")}
    return [name for name, number in numbers.items() if number is None or signal.getsignal(number) != signal.SIG_IGN]


class EndingSignals(AbstractContextManager["EndingSignals"]):
    """What is told by signals before there are ranks; then elastic's handlers, or others, take the place of these.

    At its end it gives back the handlers of before; nothing may interrupt the clean-up before that, nor what the
    command has to say after it. Ctrl-C raises KeyboardInterrupt all along.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._raises = False
        self._told: signal.Signals | None = None

    def __enter__(self) -> "EndingSignals":
        if threading.current_thread() is threading.main_thread():
            _early.leave()
            self._before = {number: signal.getsignal(number) for number in _ENDING}
            for number, handler in self._before.items():
                if number in _TO_RAISE and handler != signal.SIG_IGN:
                    signal.signal(number, self._hear)
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._raises:
            raise Interrupted(signal.Signals(number))
        self._told = signal.Signals(number)

    def let_raise(self) -> None:
        """From here on raise Interrupted when such a signal comes, or now if one has come.

        Not before modules are loaded: extension modules may lose what is raised while they set themselves up, or abort.
        """
        self._raises = True
        if self._told is not None:
            raise Interrupted(self._told)

    def pass_on(self, number: signal.Signals, send: Callable[[int], None]) -> None:
        """Call `send` when this signal comes, which ends nothing here, or now if it came while all was being loaded."""
        if self._before:
            self._before[number] = signal.signal(number, lambda number, _: send(number))
            if _early.noticed(number):
                send(number)

    def ignore(self) -> None:
        """From here on nothing interrupts."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if not _early.stays_ignored(number):
                signal.signal(number, handler)
