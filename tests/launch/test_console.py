"""How what ranks print is put together: lines, and a terminal that one rank draws on."""

import io
import os
import pty
import re
import select
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.launch import launch
from hocket.launch._console import LineAssembler, Output, Terminal, bytes_of, outputs
from hocket.testing import deadline

pieces = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"12%"]), max_size=30).map(b"".join)


def assembled(*chunks: bytes) -> list[bytes]:
    assembler = LineAssembler()
    lines = [line for chunk in chunks for line in assembler.feed(chunk)]
    return lines + assembler.rest()


@given(text=pieces, cuts=st.lists(st.integers(0, 40), max_size=5))
def test_lines_do_not_depend_on_how_they_were_read(text: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert assembled(*chunks) == assembled(text)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"", []),
        (b"one\ntwo", [b"one", b"two"]),
        (b"one\r\ntwo\r\n", [b"one", b"two"]),
        (b"\n\n", [b"", b""]),
        (b"\r 1%\r 50%\r100%\nend\n", [b"100%", b"end"]),
        (b" 1%\r 50%\r", [b" 50%"]),
    ],
)
def test_overwritten_text_is_dropped(text: bytes, lines: list[bytes]) -> None:
    assert assembled(text) == lines


def test_a_notebooks_standard_streams_have_no_bytes_beneath_and_take_lines_as_text() -> None:
    texts = io.StringIO(), io.StringIO()
    for output in outputs(*map(bytes_of, texts)):
        output.lines(b"[0] ", ["é".encode(), b"\xff"])
    assert [text.getvalue() for text in texts] == ["[0] é\n[0] \ufffd\n"] * 2


def test_an_unfinished_line_is_shown_again_only_if_it_has_changed() -> None:
    assembler = LineAssembler()
    assert assembler.snapshot() == []
    assembler.feed(b"\r1%\r2%")
    assert assembler.snapshot() == [b"2%"]
    assert assembler.snapshot() == []
    assembler.feed(b"\r3%")
    assert assembler.snapshot() == [b"3%"]


def test_a_line_is_shown_once_and_whole_whenever_it_ends() -> None:
    """`print("epoch 0", end="")`, a long step, `print()`: its beginning is not shown, or would stand twice."""
    assembler = LineAssembler()
    assembler.feed(b"epoch 0")
    assert not assembler.unfinished
    assert assembler.snapshot() == []
    assert assembler.feed(b": done\nepoch 1") == [b"epoch 0: done"]
    assert assembler.snapshot() == []
    assert assembler.rest() == [b"epoch 1"]


def test_a_bar_that_was_shown_before_its_end_is_not_shown_again_at_its_end() -> None:
    assembler = LineAssembler()
    assembler.feed(b"\r 99%\r100%")
    assert assembler.snapshot() == [b"100%"]
    assert assembler.feed(b"\nepoch 1: ") == []
    assert assembler.snapshot() == []
    assert assembler.feed(b"done\n\r1%") == [b"epoch 1: done"]
    assert assembler.snapshot() == [b"1%"]
    assert assembler.rest() == []


@pytest.mark.long
def test_a_line_is_not_shown_in_parts_because_the_line_before_is_old(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`print` writes a line and its end apart: a moment between them must not make two lines of them."""
    old_s = deadline(1.0)  # several times the moment between, however busy the machine
    monkeypatch.setattr("hocket.launch._merge.SNAPSHOT_S", old_s)
    source = f"""
import sys, time
print("first", flush=True)
time.sleep({1.3 * old_s})
sys.stdout.write("second"); sys.stdout.flush()
time.sleep(0.2)
print(" half", flush=True)
sys.stdout.write("third"); sys.stdout.flush()
time.sleep({1.3 * old_s})
print(", late", flush=True)
"""
    output = io.BytesIO()
    launch([script(source)], 1, stdout=output, stderr=output)
    assert output.getvalue().splitlines() == [b"first", b"second half", b"third, late"]


def test_endless_lines_do_not_fill_the_memory() -> None:
    assembler = LineAssembler()
    lines = [line for _ in range(40) for line in assembler.feed(b"x" * 100_000)]
    assert sum(map(len, lines)) + sum(map(len, assembler.rest())) == 4_000_000
    assert lines


@pytest.mark.parametrize("buffering", [-1, 0])
def test_a_stream_that_does_not_block_loses_nothing(buffering: int) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    lines = [b"%d " % k + bytes(k % 7) * 50 for k in range(4000)]
    found = bytearray()

    def slowly() -> None:
        while chunk := os.read(read, 1 << 12):
            found.extend(chunk)

    with open(write, "wb", buffering) as stream:
        reader = threading.Thread(target=slowly, daemon=True)
        threading.Timer(0.05, reader.start).start()
        for first in range(0, 4000, 1000):  # each more than a pipe takes
            Output(stream).lines(b"", lines[first : first + 1000])
    reader.join(deadline(20))
    os.close(read)
    assert bytes(found) == b"".join(line + b"\n" for line in lines)


class Screen:
    """A small terminal: rows of text, a cursor, and the control sequences that progress bars use."""

    def __init__(self) -> None:
        self.rows = [""]
        self.row = self.column = 0
        self.cursor_shown = True

    def show(self, data: str) -> None:
        for token in re.findall(r"\x1b\[\??\d*[A-Za-z]|[\s\S]", data):
            if token == "\n":
                self.row, self.column = self.row + 1, 0
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif token == "\r":
                self.column = 0
            elif token.endswith("K") and token.startswith("\x1b"):
                self.rows[self.row] = "" if token == "\x1b[2K" else self.rows[self.row][: self.column]
            elif token.endswith("A") and token.startswith("\x1b"):
                self.row -= int(token[2:-1] or 1)
            elif token in ("\x1b[?25l", "\x1b[?25h"):
                self.cursor_shown = token.endswith("h")
            elif not token.startswith("\x1b"):
                line = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = line[: self.column] + token + line[self.column + 1 :]
                self.column += 1

    @property
    def text(self) -> list[str]:
        return [row.rstrip() for row in self.rows]


@pytest.fixture
def drawn() -> Any:
    screen = Screen()

    class Shown(io.BytesIO):
        def write(self, data: Any) -> int:
            screen.show(bytes(data).decode())
            return len(data)

    return Terminal(Shown()), screen


def test_lines_of_others_appear_above_the_row_that_is_being_drawn(drawn: Any) -> None:
    terminal, screen = drawn
    terminal.draw(b"[0] ", b"start\n\r 10%")
    terminal.lines(b"[1] ", [b"hello", b"there"])
    assert screen.text == ["[0] start", "[1] hello", "[1] there", "[0]  10%"]
    terminal.draw(b"[0] ", b"\r 20%")
    assert screen.text[-1] == "[0]  20%"
    terminal.draw(b"[0] ", b"\r100%\nend\n")
    terminal.lines(b"[1] ", [b"bye"])
    assert screen.text == ["[0] start", "[1] hello", "[1] there", "[0] 100%", "[0] end", "[1] bye", ""]


def test_a_bar_that_clears_its_row_and_moves_up_keeps_its_prefix(drawn: Any) -> None:
    # As rich draws two rows again and again.
    terminal, screen = drawn
    terminal.draw(b"[0] ", b"one 1\ntwo 1")
    terminal.draw(b"[0] ", b"\r\x1b[2K\x1b[1A\x1b[2Kone 2\ntwo 2")
    assert screen.text == ["[0] one 2", "[0] two 2"]


def test_a_control_sequence_may_be_cut_anywhere(drawn: Any) -> None:
    terminal, screen = drawn
    for byte in b"one 1\ntwo 1\r\x1b[2K\x1b[1A\x1b[2Kone 2\ntwo 2\n":
        terminal.draw(b"[0] ", bytes([byte]))
    assert screen.text == ["[0] one 2", "[0] two 2", ""]


def test_an_unfinished_row_is_left_standing_at_the_end(drawn: Any) -> None:
    terminal, screen = drawn
    terminal.draw(b"[0] ", b"\x1b[?25l50%")
    assert not screen.cursor_shown
    terminal.end_drawing()
    terminal.lines(b"hocket: ", [b"failed"])
    assert screen.text == ["[0] 50%", "hocket: failed", ""]
    assert screen.cursor_shown


def test_on_a_terminal_rank_0_draws_and_the_others_speak_in_colour(script: Any) -> None:
    source = """
import os, sys, time
size = os.get_terminal_size() if sys.stdout.isatty() else None
print(os.environ["RANK"], sys.stdout.isatty(), sys.stderr.isatty(), size and tuple(size))
if os.environ["RANK"] == "0":
    for i in range(5):
        sys.stderr.write(f"\\r{i * 25}%")
        sys.stderr.flush()
        time.sleep(0.02)
    sys.stderr.write("\\n")
"""
    shown = on_a_terminal([sys.executable, "-m", "hocket", "run", "-n", "2", script(source)], rows=30, columns=100)
    screen = Screen()
    screen.show(shown.replace("\r\n", "\n"))
    text = [re.sub(r"\x1b\[[\d;]*m", "", row) for row in screen.text]
    assert "[0] 0 True True (96, 30)" in text
    assert "[1] 1 False False None" in text
    assert any("[0] 100%" in row for row in text)
    assert "\x1b[36m[0] \x1b[0m" in shown
    assert "\x1b[35m[1] \x1b[0m" in shown


def on_a_terminal(command: list[str], rows: int, columns: int) -> str:
    """Run a command on a terminal; what it shows."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (rows, columns))
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    shown = b""
    end_s = time.monotonic() + deadline(60)
    while time.monotonic() < end_s:
        if select.select([master], [], [], 0.1)[0]:
            try:
                shown += os.read(master, 65536)
            except OSError:  # the last one that had the terminal open has gone
                break
    os.close(master)
    assert process.wait(timeout=deadline(60)) == 0, shown
    return shown.decode()


def test_colours_can_be_refused(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    path: Path = script("print('hello')")
    shown = on_a_terminal([sys.executable, "-m", "hocket", "run", "-n", "2", str(path)], rows=30, columns=100)
    assert "\x1b[3" not in shown
    assert "[1] hello" in shown
