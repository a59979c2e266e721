"""How verbs speak: errors of the user's on stderr with exit code 2, results as JSON on stdout."""

import json
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

BAD_INPUT = 2
RANKS = ("-n", "--np", "--workers", "--nproc-per-node")
"""How every verb calls the number of ranks: the first is the documented one."""
_NEVER_WRAPPED = 16  # columns: numbers and short words
_UNBOUNDED = 10_000


def bad_input(verb: str, message: object) -> NoReturn:
    """End with one clear error.

    Args:
        verb: The verb that was asked for.
        message: Where, which value, and what to do.
    """
    print(f"hocket {verb}: {message}\n`hocket {verb} --help` shows how it is used.", file=sys.stderr)
    raise SystemExit(BAD_INPUT)


def print_json(value: Any) -> None:
    """Print a value as one JSON document."""
    print(json.dumps(value, indent=2))


def print_paragraph(text: str) -> None:
    """Print a paragraph, wrapped to the terminal or to COLUMNS; in one line where neither is there."""
    width = _width()
    print(textwrap.fill(text, width) if width else text)


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


def _width() -> int:
    """Return the columns of the terminal, or what COLUMNS says; 0 for as many as wanted."""
    return shutil.get_terminal_size((0, 0)).columns
