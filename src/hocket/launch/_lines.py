"""Chunks of what a program prints, turned into whole lines."""

_LONGEST_LINE = 1 << 20


class LineAssembler:
    """Turns chunks into whole lines. Of a line that is overwritten after carriage returns, the last state remains."""

    def __init__(self) -> None:
        self._pending = b""
        self._snapshot = b""

    @property
    def unfinished(self) -> bool:
        """Whether there is a line that no new line has ended yet."""
        return bool(self._pending)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take what was read; return the lines that it completed, without their ends."""
        *lines, rest = (self._pending + chunk).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines.append(rest)
            rest = b""
        # Of what was overwritten nothing is kept; a return at the very end has not overwritten anything yet.
        self._pending = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        return self._new([_last_state(line) for line in lines])

    def snapshot(self) -> list[bytes]:
        """The unfinished line, if it has changed since the last snapshot."""
        state = _last_state(self._pending)
        if not state or state == self._snapshot:
            return []
        self._snapshot = state
        return [state]

    def rest(self) -> list[bytes]:
        """At the end: the line that was never finished, if there is one."""
        state, self._pending = _last_state(self._pending), b""
        return self._new([state] if state else [])

    def _new(self, lines: list[bytes]) -> list[bytes]:
        """Completed lines, without the first if a snapshot has shown it as it is."""
        if not lines:
            return []
        shown, self._snapshot = self._snapshot, b""
        return lines[1:] if shown and lines[0] == shown else lines


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
