"""One thread that merges what the ranks print, line by line, and notices when each of them ends."""

import contextlib
import errno
import os
import select
import selectors
import signal
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from io import RawIOBase
from typing import ParamSpec, Self

from ._child import Child
from ._console import LineAssembler, Output, Terminal

_P = ParamSpec("_P")
_CHUNK = 1 << 16
_POLL_S = 0.02  # where the kernel (before Linux 5.3) cannot tell by a descriptor that a process has ended
_DRAIN_S = 30.0  # to show what is left at the end; only a console that does not take it could need that long
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SNAPSHOT_S = 10.0  # how often a line that is being overwritten (a progress bar) is shown where there is no terminal


@dataclass(slots=True)
class RankStream:
    """What a rank prints on one of its streams, on its way to an output."""

    output: Output  # where its lines appear
    prefix: bytes  # what stands before each line
    logs: list[RawIOBase] = field(default_factory=list)  # files that get all bytes as they are
    matches: RawIOBase | None = None  # a file that gets the prefixed lines that contain one of `needles`
    needles: tuple[bytes, ...] = ()  # what a line must contain to go to `matches`


@dataclass(slots=True)
class _Pipe:
    fd: int
    stream: RankStream
    terminal: Terminal | None  # where the stream is drawn as it is, not taken apart into lines
    lines: LineAssembler
    shown_s: float


class Merger:
    """A context: while it is open, ranks may print to the paths that it gives.

    After one rank has failed, the others may take `grace_s` to end before they get SIGKILL.
    """

    def __init__(self, grace_s: float) -> None:
        self.ended_s: dict[int, float] = {}  # when each rank that has ended did, in seconds since the epoch
        self.output_closed: OSError | None = None  # why our output cannot be written: who read it has gone, mostly
        self.log_error: OSError | None = None  # why a log file ends early, if one does; the job goes on
        # what went wrong in the thread, which has ended with it: the ranks' output is read no more
        self.broken: Exception | None = None
        self._grace_s = grace_s
        self._kill_at_s: float | None = None
        self._alive: dict[int, Child] = {}  # by pidfd
        self._polled: list[Child] = []  # those that have none
        self._watched: set[int] = set()  # the processes of the present attempt, ended or not
        self._pipes: dict[int, _Pipe] = {}  # by the descriptor that is read
        self._ends_to_close: list[int] = []
        self._resources = contextlib.ExitStack()
        self._selector = self._resources.enter_context(selectors.DefaultSelector())
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for fd in (self._wake_read, self._wake_write):
            self._resources.callback(os.close, fd)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="hocket-merge", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Show what is left. The ranks must have ended: what they wrote can then be read without waiting."""
        self._ending.set()
        self._wake()
        self._thread.join(timeout=_DRAIN_S)
        self.close_ends()
        self._resources.close()

    def log_file(self, file: RawIOBase) -> RawIOBase:
        """Return a file for what a stream prints, closed with the merger."""
        return self._resources.enter_context(file)

    def pipe(self, stream: RankStream) -> str:
        """Return a path that a rank may open for writing; what it writes becomes lines of the stream."""
        read, write = os.pipe2(os.O_CLOEXEC)
        self._add(read, write, stream, None)
        return f"/proc/self/fd/{write}"

    def adopt(self, read: int, stream: RankStream) -> None:
        """Read what comes from this descriptor, which stays its owner's, as lines of the stream."""
        self._add(os.dup(read), None, stream, None)

    def terminal(self, stream: RankStream, terminal: Terminal, prefix_columns: int) -> str:
        """Return a path of a terminal of its own for the rank that draws, as much narrower as its prefix is wide."""
        master, slave = os.openpty()
        tty.setraw(slave)  # the real terminal turns \n into \r\n; twice would be wrong
        rows, columns = terminal.size()
        termios.tcsetwinsize(master, (rows, max(1, columns - prefix_columns)))
        self._add(master, slave, stream, terminal)
        return os.ttyname(slave)

    def _add(self, read: int, write: int | None, stream: RankStream, terminal: Terminal | None) -> None:
        os.set_blocking(read, False)
        self._resources.callback(os.close, read)
        if write is not None:
            self._ends_to_close.append(write)
        self._pipes[read] = _Pipe(read, stream, terminal, LineAssembler(), time.monotonic())
        self._selector.register(read, selectors.EVENT_READ)
        self._wake()

    def close_ends(self) -> None:
        """Close the ends of the paths that we held open: the ranks have opened theirs."""
        while self._ends_to_close:
            os.close(self._ends_to_close.pop())

    def settle(self) -> None:
        """Wait (a second at most) until what the ranks have written so far has been read."""
        poll = select.poll()
        for fd in list(self._pipes):
            poll.register(fd, select.POLLIN)
        give_up_s = time.monotonic() + 1.0
        while poll.poll(0) and time.monotonic() < give_up_s:
            time.sleep(0.005)

    def watch(self, children: Iterable[Child]) -> None:
        """Notice when these ranks end, in place of those that ran before."""
        children = list(children)
        self._watched = {child.pid for child in children}
        self.ended_s = {}
        self._kill_at_s = None
        for child in children:
            try:
                pidfd = os.pidfd_open(child.pid)
            except OSError:
                self._polled.append(child)
                continue
            self._resources.callback(os.close, pidfd)
            self._alive[pidfd] = child
            self._selector.register(pidfd, selectors.EVENT_READ)
        self._wake()

    def output_ended(self) -> tuple[str, int]:
        """Return with which outcome and exit code a job ends whose output cannot be written any more."""
        full = self.output_closed is not None and self.output_closed.errno in _FULL
        return ("output-lost", 1) if full else ("output-closed", 128 + signal.SIGPIPE)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it will wake
            os.write(self._wake_write, b"x")

    def _loop(self) -> None:
        try:
            while not self._ending.is_set():
                self._turn()
            self._drain()
        except Exception as error:
            self.broken = error

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._patience_s()):
            if key.fd in self._pipes:
                self._read(self._pipes[key.fd])
            elif key.fd in self._alive:
                self._selector.unregister(key.fd)
                self._child_ended(self._alive.pop(key.fd))
            else:
                os.read(self._wake_read, _CHUNK)
        for child in list(self._polled):
            if child.status(patient=False) is not None:
                self._polled.remove(child)
                self._child_ended(child)
        self._kill_the_late()
        self._show_overwritten_lines()

    def _drain(self) -> None:
        for pipe in list(self._pipes.values()):
            while self._read(pipe):
                pass
            if pipe.fd in self._pipes:
                self._close(pipe)

    def _patience_s(self) -> float | None:
        now_s = time.monotonic()
        times_s = [pipe.shown_s + SNAPSHOT_S for pipe in list(self._pipes.values()) if pipe.lines.unfinished]
        if self._kill_at_s is not None:
            times_s.append(self._kill_at_s)
        if self._polled:
            times_s.append(now_s + _POLL_S)
        return max(0.0, min(times_s) - now_s) if times_s else None

    def _read(self, pipe: _Pipe) -> bool:
        """Read once; say whether there may be more."""
        try:
            chunk = os.read(pipe.fd, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # EIO: nobody has the other side of this terminal open any more
            chunk = b""
        if not chunk:
            self._close(pipe)
            return False
        pipe.stream.logs = [file for file in pipe.stream.logs if self._log(file, chunk)]
        if pipe.terminal is not None:
            self._show(pipe.terminal.draw, pipe.stream.prefix, chunk)
        else:
            if not pipe.lines.unfinished:  # a line begins, and has so long to end before a part of it is shown
                pipe.shown_s = time.monotonic()
            self._show_lines(pipe, pipe.lines.feed(chunk))
        return True

    def _close(self, pipe: _Pipe) -> None:
        self._selector.unregister(pipe.fd)
        del self._pipes[pipe.fd]
        if pipe.terminal is not None:
            self._show(pipe.terminal.end_drawing)
        else:
            self._show_lines(pipe, pipe.lines.rest())

    def _show_lines(self, pipe: _Pipe, lines: list[bytes]) -> None:
        if not lines:
            return
        stream = pipe.stream
        pipe.shown_s = time.monotonic()
        if stream.matches is not None:
            found = [line for line in lines if any(needle in line for needle in stream.needles)]
            if not self._log(stream.matches, b"".join(b"%b%b\n" % (stream.prefix, line) for line in found)):
                stream.matches = None
        self._show(stream.output.lines, stream.prefix, lines)

    def _log(self, file: RawIOBase, data: bytes) -> bool:
        """Write to a log file; a full disk must not stop the ranks, which wait until someone reads what they print."""
        try:
            file.write(data)
        except OSError as error:
            self.log_error = error
            return False
        return True

    def _show(self, show: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        if not self.output_closed:
            try:
                show(*args, **kwargs)
            except OSError as error:  # EPIPE, or EIO of a terminal that has gone; the launcher sees it, ends the job
                self.output_closed = error

    def _child_ended(self, child: Child) -> None:
        if child.pid not in self._watched:  # of an attempt before a restart
            return
        self.ended_s[child.rank] = time.time()
        if child.status() != 0 and self._kill_at_s is None:
            self._kill_at_s = time.monotonic() + self._grace_s

    def _kill_the_late(self) -> None:
        if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
            for child in (*self._alive.values(), *self._polled):  # not ended, so the number is still theirs
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            self._kill_at_s = None

    def _show_overwritten_lines(self) -> None:
        now_s = time.monotonic()
        for pipe in list(self._pipes.values()):
            if pipe.lines.unfinished and now_s >= pipe.shown_s + SNAPSHOT_S:
                pipe.shown_s = now_s
                self._show_lines(pipe, pipe.lines.snapshot())
