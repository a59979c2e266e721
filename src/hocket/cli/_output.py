"""How verbs speak: errors of the user's on stderr with exit code 2, results as JSON on stdout."""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from hocket._files import json_value, write_asked

BAD_INPUT = 2
RANKS = ("-n", "--np", "--workers", "--nproc-per-node")
"""How every verb calls the number of ranks: the first is the documented one."""
MOST_RANKS = 1_000_000
"""Of a schedule that is written out or simulated."""
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_NEVER_WRAPPED = 16  # columns: numbers and short words
_UNBOUNDED = 10_000


def bad_input(verb: str, message: object) -> NoReturn:
    """End with one clear error of a verb: where, which value, and what to do."""
    print(f"hocket {verb}: {message}\n`hocket {verb} --help` shows how it is used.", file=sys.stderr)
    raise SystemExit(BAD_INPUT)


@contextmanager
def one_error(verb: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Open a block in which an error of this kind, or a want of memory, ends the verb, as `bad_input` does."""
    try:
        yield
    except kind as error:
        bad_input(verb, error)
    except MemoryError as error:
        bad_input(verb, f"{str(error) or 'there is not enough memory for it'}; ask for less, such as fewer ranks")


def write_file(verb: str, path: Path, text: str, option: str = "") -> None:
    """Write a file that the user asked for, whole, or end with one clear error; the old file is as it was then."""
    with writing(verb, path, option):
        write_asked(path, text)


@contextmanager
def writing(verb: str, path: Path, option: str) -> Iterator[None]:
    """Open a block in which a file that cannot be written ends the verb with one clear error that names the option."""
    try:
        yield
    except OSError as error:
        bad_input(verb, f"{option}{str(path)!r} cannot be written: {error.strerror}")


def check_place(verb: str, path: Path | None, option: str = "") -> None:
    """End as `write_file` would, but before the work of minutes whose result nobody could write there."""
    if path is None:
        return
    place = path
    with writing(verb, path, option):
        try:
            path.stat()
        except FileNotFoundError:
            place = path.parent
    if path.is_dir() or not os.access(place, os.W_OK):
        bad_input(verb, f"{option}{str(path)!r} cannot be written: give a file in a directory that is there")


def print_json(value: Any) -> None:
    print(json.dumps(json_value(value), indent=2, allow_nan=False))


def print_paragraph(text: str) -> None:
    """Print a paragraph, wrapped to the terminal or to COLUMNS; in one line where neither is there."""
    width = _width()
    print(textwrap.fill(text, width, break_on_hyphens=False) if width else text)


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows under their keys. Where a terminal or COLUMNS is narrower than the table, its texts are wrapped."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="", highlight=False)
    for name in rows[0]:
        longest = max(len(name), *(len(row[name]) for row in rows))
        table.add_column(name, no_wrap=longest <= _NEVER_WRAPPED, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    console = Console(width=_width() or _UNBOUNDED, markup=False, highlight=False, color_system=None)
    with console.capture() as printed:
        console.print(table)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))


def print_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a head, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def _width() -> int:
    """Return the columns of the terminal, or what COLUMNS says; 0 for as many as wanted."""
    return shutil.get_terminal_size((0, 0)).columns
