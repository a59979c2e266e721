"""Where the ranks' merged output goes: a terminal, or anything else. Lines are written whole, whoever prints."""

import io
import os
import re
import select
import threading
from typing import Any, BinaryIO, TextIO, cast

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

_RANK_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")

# What a program writes to a terminal: a new line, a return to the row's start, a control sequence (ECMA-48 CSI, OSC,
# or two characters), or text. A sequence may be cut by the end of what has been read.
_TOKEN = re.compile(rb"\n|\r|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[^\[\]])|[^\n\r\x1b]+")
_LONGEST_SEQUENCE = 256
_LONGEST_LINE = 1 << 20


class Output:
    """A stream that takes whole lines; the base for one that is no terminal."""

    is_terminal = False

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._colour = _colour_system(stream)

    def styled(self, text: str, style: str) -> bytes:
        """Return the text in a rich style, if the stream shows colours."""
        shown = Style.parse(style).render(text, color_system=self._colour) if self._colour else text
        return shown.encode(errors="replace")

    def rank_prefix(self, text: str, rank: int) -> bytes:
        """Return what stands before a rank's lines, in that rank's colour."""
        return self.styled(text, _RANK_COLOURS[rank % len(_RANK_COLOURS)])

    def lines(self, prefix: bytes, lines: list[bytes]) -> None:
        """Write lines, given without their ends, each after the prefix.

        Raises:
            BrokenPipeError: Who read the stream has gone.
        """
        if lines:
            with self._lock:
                self._put(b"".join(b"%b%b\n" % (prefix, line) for line in lines))

    def _put(self, data: bytes) -> None:
        self._write(data)

    def _write(self, data: bytes) -> None:
        # Who started us may have made the stream non-blocking, as Node.js does with pipes. And a raw one, as standard
        # streams are under PYTHONUNBUFFERED, takes what it can: it returns how much, or None.
        raw, left = isinstance(self._stream, io.RawIOBase), data
        while True:
            try:
                if left:
                    taken = self._stream.write(left)
                    left = left[(taken or 0) if raw else len(left) :]
                if not left:
                    self._stream.flush()
                    return
            except BlockingIOError as error:
                left = left[error.characters_written if left else 0 :]
            select.select([], [self._stream], [])


class Terminal(Output):
    """A terminal: one rank may draw on it as it likes, and other lines appear above what it is drawing."""

    is_terminal = True

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream)
        self._row = b""  # what the drawing rank has put on the row where the cursor is
        self._cut = b""  # the beginning of a control sequence whose end has not been read yet
        self._changed = False  # whether the drawing rank may have hidden the cursor or changed the colours

    def size(self) -> tuple[int, int]:
        """Return the rows and columns."""
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except (OSError, io.UnsupportedOperation):
            return 24, 80
        return size.lines, size.columns

    def draw(self, prefix: bytes, data: bytes) -> None:
        """Pass on what the drawing rank writes, with the prefix before the first character of every row."""
        with self._lock:
            data = self._cut + data
            shown = bytearray()
            end = 0
            while token := _TOKEN.match(data, end):
                end = token.end()
                text = token.group()
                if text in (b"\n", b"\r"):
                    self._row = b""
                    shown += text
                    continue
                self._changed |= text.startswith(b"\x1b")
                if not self._row and not text.startswith(b"\x1b"):
                    shown += prefix
                    self._row = prefix + text
                elif self._row:
                    self._row += text
                shown += text
            self._cut = data[end:]
            if len(self._cut) > _LONGEST_SEQUENCE:
                shown += self._cut
                self._cut = b""
            self._write(bytes(shown))

    def end_drawing(self) -> None:
        """Close what the drawing rank left: its last row, perhaps unfinished, the cursor and the colours."""
        with self._lock:
            restore = b"\x1b[0m\x1b[?25h" if self._changed else b""
            self._write(restore + (b"\n" if self._row else b""))
            self._row = self._cut = b""
            self._changed = False

    def _put(self, data: bytes) -> None:
        # Clear the row, write above it, draw it again.
        self._write(b"\r\x1b[K" + data + self._row if self._row else data)


def _colour_system(stream: BinaryIO) -> ColorSystem | None:
    if not stream.isatty():
        return None
    # rich knows NO_COLOR, TERM=dumb and the like.
    console = Console(file=io.TextIOWrapper(stream, write_through=True), force_terminal=True)
    known = console.color_system if not console.no_color else None
    cast(io.TextIOWrapper, console.file).detach()  # or its end would close the stream
    return ColorSystem.STANDARD if known else None


class _TextStream(io.BufferedIOBase):
    """Bytes to a stream of text that has no bytes beneath: a notebook's, or one that `redirect_stdout` put there."""

    def __init__(self, text: TextIO) -> None:
        self._text = text

    def write(self, data: Any, /) -> int:
        return self._text.write(bytes(data).decode(errors="replace"))

    def flush(self) -> None:
        self._text.flush()


def bytes_of(text: TextIO) -> BinaryIO:
    """Return what takes bytes for a standard stream."""
    return cast(BinaryIO, getattr(text, "buffer", None) or _TextStream(text))


def outputs(stdout: BinaryIO, stderr: BinaryIO) -> tuple[Output, Output]:
    """Return outputs on two streams; a terminal that both lead to becomes one output, drawn on in one place."""
    if _can_draw(stdout) and _can_draw(stderr) and os.ttyname(stdout.fileno()) == os.ttyname(stderr.fileno()):
        terminal = Terminal(stdout)
        return terminal, terminal
    return _output(stdout), _output(stderr)


def _output(stream: BinaryIO) -> Output:
    return Terminal(stream) if _can_draw(stream) else Output(stream)


def _can_draw(stream: BinaryIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class LineAssembler:
    """Turns chunks into whole lines. Of a line that is overwritten after carriage returns, the last state remains."""

    def __init__(self) -> None:
        self._pending = b""
        self._overwritten = False
        self._snapshot = b""

    @property
    def unfinished(self) -> bool:
        """Whether there is a line that is overwritten again and again, and that no new line has ended yet."""
        return self._overwritten and bool(self._pending)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take what was read; return the lines that it completed, without their ends."""
        *lines, rest = (self._pending + chunk).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines.append(rest)
            rest = b""
        self._overwritten = b"\r" in rest or (self._overwritten and not lines)
        # Of what was overwritten nothing is kept; a return at the very end has not overwritten anything yet.
        self._pending = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        return self._new([_last_state(line) for line in lines])

    def snapshot(self) -> list[bytes]:
        """Return the line that is being overwritten, if it has changed since the last snapshot.

        Another unfinished line is not shown before it ends: its beginning would stand there twice.
        """
        state = _last_state(self._pending) if self._overwritten else b""
        if not state or state == self._snapshot:
            return []
        self._snapshot = state
        return [state]

    def rest(self) -> list[bytes]:
        """At the end: the line that was never finished, if there is one."""
        state, self._pending = _last_state(self._pending), b""
        return self._new([state] if state else [])

    def _new(self, lines: list[bytes]) -> list[bytes]:
        """Return completed lines, without the first if a snapshot has shown it as it is."""
        if not lines:
            return []
        shown, self._snapshot = self._snapshot, b""
        return lines[1:] if shown and lines[0] == shown else lines


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
