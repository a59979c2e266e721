"""One page that tells of a run: verdicts, where a step's time went, ranks over time, collectives, memory, environment.

The page is one HTML file without any reference to the network, for light and dark screens and for paper. Its size does
not grow with the number of ranks beyond their heat map: of many ranks it shows the slowest, and quantiles of the rest.
"""

import base64
import html
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

import numpy as np

from hocket.planner import LEVEL
from hocket.profile import HVPROF_BINS, OPERATION, SAMPLE, RankRun, RunRecord

from ._explain import Explanation
from ._links import links_of
from ._parts import (
    BLOCKED,
    BUBBLE,
    CHECKPOINT,
    COLLECTOR,
    COMMUNICATION,
    COMPUTATION,
    CORES,
    DATA,
    IDEAL,
    LATE,
    OPTIMIZER,
    SLOWER,
    Array,
    Parts,
)  # fmt: skip
from ._predicted import PredictedStep
from ._verdict import ms

_SHOWN = 24  # ranks in the timeline, and in the table
_STEPS_SHOWN = 6  # in the timeline
_ROWS = 250  # of the heat map
_POINTS = 120  # of a line of memory
_COLORS = {
    COMPUTATION: "a", OPTIMIZER: "b", DATA: "c", CHECKPOINT: "d", COLLECTOR: "e", COMMUNICATION: "f", LATE: "g",
    BUBBLE: "h", IDEAL: "a", CORES: "e", BLOCKED: "c", SLOWER: "d",
}  # fmt: skip


def report(found: Explanation, other: Explanation | None = None) -> str:
    """Return the page about a run as HTML.

    Args:
        found: What is said of the run.
        other: What is said of another run, to be shown beside it; None for none.
    """
    run, parts = found.run, found.parts
    sections = [_verdicts(found)]
    if other is not None:
        sections.append(_compared(found, other))
    data: dict[str, Any] = {}
    if parts is not None:
        sections.append(_waterfall(parts, found.places))
        if found.predicted is not None:
            sections.append(_predicted(found.predicted))
        sections += [_ranks(parts), _CANVASES]
        data = {"heat": _heat(parts), "timeline": _timeline(parts)}
    sections += [_collectives(run), *_links(run), *_values(run), _memory(run), _environment(run)]
    page = resources.files(__package__).joinpath("_report.html").read_text(encoding="utf-8")
    step = "no steps" if parts is None else f"{parts.steps} steps of {_time(parts.step_s)}"
    hosts = len({one.host for one in run.ranks})
    summary = f"{run.world} ranks on {hosts} host{'s' if hosts > 1 else ''}, {run.seconds:.1f} s recorded, {step}"
    title = f"Run {run.folder.parent.name if run.folder.name == 'record' else run.folder.name}"
    for mark, text in (
        ("TITLE", html.escape(title)),
        ("SUMMARY", html.escape(summary)),
        ("SECTIONS", "\n".join(sections)),
        ("DATA", json.dumps(data, separators=(",", ":")).replace("</", "<\\/")),
    ):
        page = page.replace(f"@@{mark}@@", text)
    return page


_CANVASES = """<section><h2>Every rank, every step</h2>
<p>A row is a rank (of many ranks, the busiest of some), a column a step; the stronger, the more the rank did by itself (waiting left out).</p>
<canvas id="heat" role="img" tabindex="0" aria-label="Heat map of own work by rank and step; the table of ranks has its means"></canvas>
<p id="heat-at" class="note" aria-live="polite">Point at a cell to read it.</p></section>
<section><h2>The last steps</h2>
<p>In each step the parts stand one after the other, not as they came. Drag to move, turn the wheel or press + and - to zoom, 0 shows all.</p>
<canvas id="timeline" role="img" tabindex="0" aria-label="Timeline of the ranks in the last steps; the table of parts has its sums"></canvas>
<p id="timeline-at" class="note" aria-live="polite">Point at a part to read it.</p></section>"""  # noqa: E501


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{ms(seconds)} ms"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>\n{body}</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Return a table whose first `texts` columns are texts, the others numbers."""
    cells = "".join(
        f'<th scope="col"{"" if i < texts else " class=n"}>{html.escape(t)}</th>' for i, t in enumerate(head)
    )
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{'' if i < texts else ' class=n'}>{html.escape(t)}</td>" for i, t in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide" tabindex="0"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def _color(part: str) -> str:
    return _COLORS[COMMUNICATION] if part.startswith(COMMUNICATION) else _COLORS.get(part, "i")


def _verdicts(found: Explanation) -> str:
    cards = []
    if found.hang is not None:
        cards.append(
            f"<li><strong>{html.escape(found.hang.sentence)}</strong><p>{html.escape(found.hang.next_step)}</p></li>"
        )
    cards += [
        f"<li><strong>{html.escape(one.sentence)}</strong><p>{html.escape(one.evidence)} "
        f"({one.confidence} confidence)</p><p>Next: {html.escape(one.next_step)}</p></li>"
        for one in found.verdicts
    ]
    remarks = "".join(f"<p>{html.escape(one[0].upper() + one[1:])}.</p>" for one in found.remarks)
    return _section("Verdicts", (f'<ol class="verdicts">{"".join(cards)}</ol>' if cards else "") + remarks)


def _waterfall(parts: Parts, places: Sequence[tuple[str, float]]) -> str:
    rows = parts.waterfall()
    bars, at = [], 0.0
    for name, seconds in rows:
        share = seconds / parts.step_s
        begin = max(0.0, min(at, at + share))
        bars.append(
            f"<tr><td>{html.escape(name)}</td><td class=n>{_time(seconds)}</td><td class=n>{share:.1%}</td>"
            f'<td class="bar"><span class="{_color(name)}" style="margin-left:{begin:.3%};width:{abs(share):.3%}">'
            "</span></td></tr>"
        )
        at += share
    head = (
        "<tr><th scope=col>from one rank alone on</th><th scope=col class=n>time</th><th scope=col class=n>share</th>"
        "<th scope=col>of the step</th></tr>"
    )
    total = f"<tr><td>the step</td><td class=n>{_time(parts.step_s)}</td><td class=n>100%</td><td></td></tr>"
    return _section(
        "Where a step's time goes",
        "<p>The mean over ranks and steps; the rows add up to it. One rank alone: as measured in the same run, or "
        "what its quickest steps take to compute and to update.</p>"
        f'<div class="wide" tabindex="0"><table class="fall"><thead>{head}</thead><tbody>{"".join(bars)}{total}</tbody>'
        "</table></div>"
        + (
            "<p>Computation, by where ranks were read in it.</p>"
            + _table(["line of the program", "share"], [(place, f"{share:.0%}") for place, share in places])
        )
        * bool(places),
    )


def _predicted(found: PredictedStep) -> str:
    head = ["part", "predicted", "measured", "error"]
    within = " to ".join(_time(seconds) for seconds in found.interval_s)
    least_s = 0.01 * found.measured_s

    def row(name: str, predicted: float, measured: float) -> list[str]:
        error = f"{predicted / measured - 1:+.1%}" if measured > least_s else ""
        return [name, _time(predicted), _time(measured), error]

    body = f"<p>The plan: {html.escape(found.plan)}.</p>" if found.plan else ""
    body += f"<p>Predicted is what the steps take when nothing disturbs them: {within} with {LEVEL:.0%}.</p>"
    body += _table(head, [*(row(*one) for one in found.rows), row("the step", found.step_s, found.measured_s)])
    if found.planned:
        body += "<p>What the plan said before the run.</p>" + _table(head, [row(*one) for one in found.planned])
    body += "<p>What would be otherwise.</p>"
    others = [
        [one.what, "-", "-", "-", one.note] if one.step_s != one.step_s else
        [one.what, _time(one.step_s), " to ".join(_time(s) for s in one.interval_s), f"{one.throughput:.2f}", one.note]
        for one in found.what_ifs
    ]  # fmt: skip
    return _section(
        "Predicted beside measured",
        body + _table(["with", "a step", f"with {LEVEL:.0%} within", "times the samples a second", "note"], others),
    )


def chosen_ranks(parts: Parts) -> list[int]:
    """Return the ranks to show: all of few; of many the ones that work longest, and others at equal quantiles."""
    work = parts.work.mean(axis=1)
    order = np.argsort(-work, kind="stable")
    if len(order) <= _SHOWN:
        return sorted(order.tolist())
    slow = order[: _SHOWN // 2]
    rest = order[_SHOWN // 2 :]
    return [*slow.tolist(), *rest[np.linspace(0, len(rest) - 1, _SHOWN - len(slow)).astype(int)].tolist()]


def _ranks(parts: Parts) -> str:
    names = [name for name, _ in parts.means()]
    means = {name: parts.of(name).mean(axis=1) for name in names}
    shown = chosen_ranks(parts)
    rows = [
        [
            f"{one.rank}",
            one.host,
            f"{parts.work[number].mean() * 1e3:.3f}",
            *(f"{means[name][number] * 1e3:.3f}" for name in names),
        ]
        for number in shown
        for one in [parts.run.ranks[number]]
    ]
    total = len(parts.run.ranks)
    note = (
        f"<p>{len(shown)} of {total} ranks: those that work longest, and others at equal quantiles.</p>"
        if total > len(shown)
        else ""
    )
    return _section(
        "Ranks", f"{note}<p>Milliseconds of a mean step.</p>" + _table(["rank", "host", "own work", *names], rows, 2)
    )


def _heat(parts: Parts) -> dict[str, Any]:
    """Return own work as a byte for each cell; of many ranks a row has the most of several, so that none is lost."""
    work = parts.work
    fold = -(-work.shape[0] // _ROWS)
    rows = np.stack([work[first : first + fold].max(axis=0) for first in range(0, work.shape[0], fold)])
    low, high = float(np.quantile(work, 0.02)), float(max(np.quantile(work, 0.99), np.median(work, axis=1).max()))
    scaled = np.clip((rows - low) / max(high - low, 1e-9) * 255, 0, 255).astype(np.uint8)
    return {
        "numbers": [one.rank for one in parts.run.ranks], "ranks": work.shape[0], "rows": rows.shape[0], "fold": fold,
        "steps": work.shape[1], "first": parts.first,
        "low": low, "high": high, "cells": base64.b64encode(scaled.tobytes()).decode(),
    }  # fmt: skip


def _timeline(parts: Parts) -> dict[str, Any]:
    """Return for the ranks that are shown the parts of their last steps, one after the other as they add up."""
    count = min(_STEPS_SHOWN, parts.steps)
    shown = chosen_ranks(parts)
    begin_s = float(parts.bounds_s[:, -1 - count].min())
    names = [name for name, _ in parts.means()]
    rows = []
    for number in shown:
        steps = []
        for step in range(parts.steps - count, parts.steps):
            lengths = [round(float(parts.of(name)[number, step]) * 1e6, 1) for name in names]
            steps.append([round((float(parts.bounds_s[number, step]) - begin_s) * 1e6, 1), lengths])
        rows.append({"name": f"rank {parts.run.ranks[number].rank}", "steps": steps})
    return {"names": names, "colors": [_color(name) for name in names], "rows": rows}


def _collectives(run: RunRecord) -> str:
    rows: dict[tuple[str, str], list[float]] = {}
    for one in run.ranks[: 4 * _SHOWN]:
        found = one.of(OPERATION)
        for text in np.unique(found["text"]):
            kind = one.texts[int(text)][0] if text else "?"
            some = found[found["text"] == text]
            for size in HVPROF_BINS:
                inside = some[(some["nbytes"] <= size.upto) & (some["nbytes"].astype(np.int64) > size.above)]
                if len(inside):
                    came_s = np.maximum(inside["published_s"], inside["started_s"])
                    total = rows.setdefault((kind, size.name), [0, 0.0, 0.0, 0.0])
                    total[0] += len(inside)
                    total[1] += float(inside["nbytes"].sum())
                    total[2] += float((inside["finished_s"] - inside["started_s"]).sum())
                    total[3] += float(np.maximum(inside["arrived_s"] - came_s, 0.0).sum())
    ranks = min(len(run.ranks), 4 * _SHOWN)
    table = [
        [kind, size, f"{count / ranks:,.0f}", f"{nbytes / ranks / 1e6:,.1f}", f"{time_s / ranks * 1e3:,.1f}",
         f"{skew_s / ranks * 1e3:,.1f}", f"{nbytes / max(time_s - skew_s, 1e-12) / 1e9:.2f}"]
        for (kind, size), (count, nbytes, time_s, skew_s) in sorted(rows.items())
    ]  # fmt: skip
    if not table:
        return _section("Collectives by size", "<p>None were recorded.</p>")
    head = ["collective", "message size", "count", "MB", "time ms", "of it waiting for late ranks ms", "GB/s"]
    return _section("Collectives by size", "<p>Of one rank, the mean.</p>" + _table(head, table, 2))


def _links(run: RunRecord) -> list[str]:
    links = sorted(links_of(run), key=lambda one: one.rate_Bps)
    if not links:
        return []
    rows = [
        [one.source, one.destination, f"{one.nbytes / 1e6:,.1f}", f"{one.busy_s:.2f}", f"{one.rate_Bps / 1e6:,.1f}",
         f"{one.busy_s / run.seconds:.1%}", f"{one.rtt_s * 1e3:.2f}", f"{one.least_rtt_s * 1e3:.2f}", f"{one.resent:,}"]
        for one in links[:_SHOWN]
    ]  # fmt: skip
    head = [
        "from",
        "to",
        "MB",
        "in use s",
        "MB/s while in use",
        "load",
        "round trip ms",
        "the shortest ms",
        "sent again",
    ]
    text = f"<p>The slowest {len(rows)} of {len(links)}, as the kernel counts the ranks' TCP connections.</p>"
    return [_section("Links between hosts", text + _table(head, rows, 2))]


def _values(run: RunRecord) -> list[str]:
    """Return what the program told of its steps: the first rank that told it speaks for all."""
    told: dict[str, Array] = {}
    for one in run.ranks:
        for name, rows in one.values().items():
            told.setdefault(name, rows)
    if not told:
        return []
    table = []
    for name, rows in list(told.items())[:_SHOWN]:
        values = rows["value"]
        low, high = (np.nanmin(values), np.nanmax(values)) if np.isfinite(values).any() else (np.nan, np.nan)
        shown = [f"{number:.6g}" for number in (values[0], low, high, values[-1])]
        table.append([name, f"{len(rows):,}", f"{rows['step'][-1]:,}", *shown])
    return [
        _section("Values of steps", _table(["value", "count", "last step", "first", "least", "most", "last"], table))
    ]


def _memory(run: RunRecord) -> str:
    lines = [(one, one.of(SAMPLE)) for one in run.ranks]
    lines = [(one, rows) for one, rows in lines if len(rows) > 1]
    if not lines:
        return _section("Memory", "<p>No samples: the run was shorter than a second.</p>")
    top = max(float(rows["nbytes"].max()) for _, rows in lines)
    peaks = sorted(lines, key=lambda line: -float(line[1]["nbytes"].max()))
    drawn = (
        peaks
        if len(peaks) <= _SHOWN
        else [*peaks[:4], *(peaks[i] for i in np.linspace(4, len(peaks) - 1, 8).astype(int))]
    )
    paths = "".join(_line(rows, run.seconds, top, one) for one, rows in drawn)
    table = [
        [f"{one.rank}", one.host, f"{rows['nbytes'].max() / 2**20:,.0f}", f"{rows['nbytes'][-1] / 2**20:,.0f}",
         f"{rows['started_s'][-1]:.1f}"]
        for one, rows in peaks[:_SHOWN]
    ]  # fmt: skip
    label = (
        f"Resident memory of {len(drawn)} ranks over {run.seconds:.0f} s, at most {top / 2**20:,.0f} MiB: see the table"
    )
    return _section(
        "Memory",
        f'<svg viewBox="0 0 1000 200" preserveAspectRatio="none" role="img" aria-label="{label}">{paths}</svg>'
        f"<p class=note>0 to {top / 2**20:,.0f} MiB, 0 to {run.seconds:.0f} s.</p>"
        + _table(["rank", "host", "peak MiB", "last MiB", "CPU s"], table, 2),
    )


def _line(rows: Array, seconds: float, top: float, one: RankRun) -> str:
    chosen = rows[np.unique(np.linspace(0, len(rows) - 1, _POINTS).astype(int))]
    points = " ".join(
        f"{at / max(seconds, 1e-9) * 1000:.1f},{200 - used / top * 190:.1f}"
        for at, used in zip(chosen["posted_s"].tolist(), chosen["nbytes"].tolist(), strict=True)
    )
    return f'<polyline points="{points}"><title>rank {one.rank}</title></polyline>'


def _environment(run: RunRecord) -> str:
    first = run.ranks[0]
    hosts: dict[str, list[int]] = {}
    for one in run.ranks:
        hosts.setdefault(one.host, []).append(one.rank)
    rows = [[key, str(value)] for key, value in first.about.items() if key not in ("main_thread", "boot")]
    some = [[host, f"{len(ranks)} ranks, {ranks[0]} to {ranks[-1]}"] for host, ranks in list(hosts.items())[:_SHOWN]]
    return _section("Environment", _table(["of rank 0", "value"], rows, 2) + _table(["host", "ranks"], some, 2))


def _compared(found: Explanation, other: Explanation) -> str:
    one, two = found.parts, other.parts
    if one is None or two is None:
        return _section("Beside the other run", "<p>One of the runs has no steps to compare.</p>")
    first, second = dict(one.means()), dict(two.means())
    rows = [
        [name, _time(first.get(name, 0.0)), _time(second.get(name, 0.0)),
         f"{(second.get(name, 0.0) - first.get(name, 0.0)) * 1e3:+.3f} ms"]
        for name in dict.fromkeys([*first, *second])
    ]  # fmt: skip
    rows.append(["step", _time(one.step_s), _time(two.step_s), f"{(two.step_s - one.step_s) * 1e3:+.3f} ms"])
    change = two.step_s / one.step_s - 1.0
    text = (
        f"A step takes {abs(change):.1%} {'longer' if change > 0 else 'less'} in {other.run.folder} than in this run."
    )
    return _section(
        "Beside the other run",
        f"<p>{html.escape(text)}</p>" + _table(["part", "this run", "other run", "change"], rows),
    )
