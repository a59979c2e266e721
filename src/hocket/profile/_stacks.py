"""Where a thread is in the program, read without an object of its frames.

An object of a running frame (`sys._current_frames`) is no safe thing in another thread: the frame may end between two
reads, and Python 3.11 has died of it. `faulthandler` writes stacks in compiled code, all at once under the
interpreter's lock.
"""

import contextlib
import faulthandler
import fcntl
import itertools
import os
import re
import time

_FRAMES = 40
_PIPE_NBYTES = 1 << 20  # what a process without privileges may ask for; past it the rest of a dump is lost
_SHARE = 0.001  # of a core may reading stacks take
_OWN = (f"{__file__}:", f"{os.path.dirname(__file__)}/_watch.py:")  # innermost where the watch itself begins
_THREAD = re.compile(r"hread 0x0*([0-9a-f]+) ")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPED = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")


class StackReader:
    """Reads the stack of one thread, as often as a thousandth of a core allows."""

    def __init__(self, ident: int) -> None:
        self._ident = ident
        self._read_from, self._write_to = os.pipe()
        os.set_blocking(self._read_from, False)
        os.set_blocking(self._write_to, False)  # a full pipe must not hold the interpreter's lock
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._write_to, fcntl.F_SETPIPE_SZ, _PIPE_NBYTES)
        self._due_s = 0.0
        self._first = True  # the first read, which sets up what later ones find, does not put off the next

    def read(self) -> list[str] | None:
        """Return its frames as "FILE:LINE FUNCTION", the innermost first, at most 40; None where it is too early."""
        if time.perf_counter() < self._due_s:
            return None
        before_s = time.thread_time()
        faulthandler.dump_traceback(self._write_to, all_threads=True)
        stacks = stacks_of(self._dump())
        if not self._first:
            self._due_s = time.perf_counter() + (time.thread_time() - before_s) / _SHARE
        self._first = False
        stack = itertools.dropwhile(lambda line: line.startswith(_OWN), stacks.get(self._ident, []))
        return list(itertools.islice(stack, _FRAMES))

    def close(self) -> None:
        for file in (self._read_from, self._write_to):
            with contextlib.suppress(OSError):
                os.close(file)

    def _dump(self) -> str:
        parts = []
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._read_from, _PIPE_NBYTES):
                parts.append(part)
        return b"".join(parts).decode(errors="replace")


def stacks_of(dump: str) -> dict[int, list[str]]:
    """Return the stacks in what `faulthandler` wrote, by thread and in its order, as "FILE:LINE FUNCTION"."""
    stacks: dict[int, list[str]] = {}
    lines: list[str] = []
    for line in dump.splitlines():
        if thread := _THREAD.search(line):
            lines = stacks.setdefault(int(thread[1], 16), [])
        elif frame := _FRAME.match(line):
            file, number, function = (_ESCAPED.sub(lambda one: chr(int(one[0][2:], 16)), p) for p in frame.groups())
            lines.append(f"{file}:{number} {function}")
    return stacks
