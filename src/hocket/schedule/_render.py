"""Draws a schedule for people: a grid of ranks and steps, as text and as SVG."""

from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

import numpy as np

from ._findings import Finding
from ._ir import Schedule, Step

MOST_ENTRIES: Final = 3
GRID_RANKS: Final = 64
GRID_STEPS: Final = 64

_COLOURS: Final = ("#4063d8", "#389826", "#9558b2", "#cb3c33", "#d8870b", "#1b9aaa", "#8a6d3b", "#5b6770")


def describe(schedule: Schedule) -> str:
    """Return one line: name, contract, and how much of everything."""
    parts = [
        f"{schedule.name}: {schedule.collective}",
        _count(schedule.chunks, "chunk"),
        _count(schedule.step_count, "step"),
        _count(schedule.transfer_count, "transfer"),
    ]
    if schedule.switches:
        parts.append(_count(len(schedule.switches), "reducing switch", "reducing switches"))
    return ", ".join(parts)


def grid(schedule: Schedule, findings: Sequence[Finding] = ()) -> str:
    """Return what each endpoint sends in each step, one row an endpoint, one column a step.

    `3+>1` is "chunk 3 is added to rank 1's", `3=>1` "is copied to rank 1's", `0:4+>1` four chunks. A place that a
    finding names is marked with !. Large schedules are cut to their first ranks and steps, and say so.
    """
    steps = _first_steps(schedule)
    endpoints = _shown(schedule)
    marks = {(finding.step, finding.transfer) for finding in findings}
    header = ["step", *(str(number) for number in range(len(steps)))]
    rows = [header]
    for endpoint in endpoints:
        row = [schedule.describe(endpoint)]
        row.extend(_cell(schedule, number, step, endpoint, marks) for number, step in enumerate(steps))
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.extend(_left_out(schedule, len(endpoints), len(steps)))
    return "\n".join(lines) + "\n"


def svg(schedule: Schedule, findings: Sequence[Finding] = ()) -> str:
    """Return the grid as an SVG picture: time goes down, one column an endpoint, an arrow a transfer.

    Solid arrows reduce, dashed ones copy.

    Colours go by chunk; a red arrow is one that a finding names.
    """
    steps = _first_steps(schedule)
    endpoints = _shown(schedule)
    column = {endpoint: place for place, endpoint in enumerate(endpoints)}
    marks = {(finding.step, finding.transfer) for finding in findings}
    wide, high, top, left = 90, 46, 64, 70
    width, height = left + wide * len(endpoints), top + high * len(steps) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="context-stroke"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="20" font-size="14">{escape(describe(schedule))}</text>',
    ]
    for endpoint, place in column.items():
        x = left + wide * place + wide // 2
        parts.append(f'<text x="{x}" y="{top - 14}" text-anchor="middle">{escape(schedule.describe(endpoint))}</text>')
        parts.append(f'<path d="M{x} {top - 6}V{height - 14}" stroke="#d0d4da"/>')
    for number, step in enumerate(steps):
        y = top + high * number
        parts.append(f'<text x="12" y="{y + high // 2}" fill="#667">step {number}</text>')
        rows = np.flatnonzero(np.isin(step.source, endpoints) & np.isin(step.destination, endpoints))
        columns = (rows.tolist(), *(values[rows].tolist() for values in step.columns))
        for row, source, destination, start, stop, reduce in zip(*columns, strict=True):
            colour = "#e00" if (number, row) in marks else _COLOURS[start % len(_COLOURS)]
            x1, x2 = (left + wide * column[end] + wide // 2 for end in (source, destination))
            label = f"chunk{'s' if stop - start > 1 else ''} {_range(start, stop)}"
            dash = "" if reduce else ' stroke-dasharray="5 3"'
            parts.append(
                f'<path d="M{x1} {y + 6}L{x2} {y + high - 8}" stroke="{colour}" stroke-width="1.5"{dash} '
                f'marker-end="url(#tip)"><title>{label}: {schedule.endpoint(source)} to '
                f"{schedule.endpoint(destination)}, {'reduce' if reduce else 'copy'}</title></path>"
            )
    notes = " ".join(_left_out(schedule, len(endpoints), len(steps)))
    parts.append(f'<text x="12" y="{height - 4}" fill="#667">{escape(notes)}</text></svg>')
    return "\n".join(parts) + "\n"


def _first_steps(schedule: Schedule) -> list[Step]:
    steps: list[Step] = []
    for step in schedule.each_step():
        if len(steps) == GRID_STEPS:
            break
        steps.append(step)
    return steps


def _shown(schedule: Schedule) -> list[int]:
    switches = range(schedule.world, min(schedule.endpoints, schedule.world + GRID_RANKS))
    return [*range(min(schedule.world, GRID_RANKS)), *switches]


def _left_out(schedule: Schedule, endpoints: int, steps: int) -> list[str]:
    left = []
    if endpoints < schedule.endpoints:
        left.append(f"{schedule.endpoints - endpoints} more ranks and switches are not shown.")
    if steps < schedule.step_count:
        left.append(f"{schedule.step_count - steps} more steps are not shown.")
    return left


def _cell(schedule: Schedule, number: int, step: Step, endpoint: int, marks: set[tuple[int | None, int | None]]) -> str:
    rows = np.flatnonzero(step.source == endpoint).tolist()
    entries = []
    for row in rows[:MOST_ENTRIES]:
        chunks = _range(int(step.start[row]), int(step.stop[row]))
        verb = "+" if step.reduce[row] else "="
        mark = "!" if (number, row) in marks else ""
        entries.append(f"{chunks}{verb}>{schedule.endpoint(int(step.destination[row]))}{mark}")
    if len(rows) > MOST_ENTRIES:
        entries.append(f"and {len(rows) - MOST_ENTRIES} more")
    return " ".join(entries) or "."


def _range(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}:{stop}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
