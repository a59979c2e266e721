"""Timelines as JSON that https://ui.perfetto.dev opens: the Trace Event Format of Chrome.

Every rank is a process and every stream a thread; a stream whose spans overlap has several, as a thread's slices must
nest. Times are microseconds. Equal timelines give equal bytes.
"""

import json
from pathlib import Path
from typing import Any

from hocket._files import write_asked

from ._timeline import Counter, Span, Timeline


def to_perfetto(timeline: Timeline) -> dict[str, Any]:
    """Return the document.

    Args:
        timeline: What to write.

    Returns:
        A value for `json.dump`: `traceEvents` with metadata, slices ("X"), arrows ("s" and "f") and counters ("C").
    """
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, str, int], int] = {}
    lanes = _lanes(timeline.spans)
    named = timeline.names.get
    for rank in timeline.ranks:
        events.append(_meta("process_name", rank, 0, {"name": named(rank, f"rank {rank}")}))
        events.append(_meta("process_sort_index", rank, 0, {"sort_index": rank}))
    for rank, stream, lane in sorted({(span.rank, span.stream, lane) for span, lane in lanes}):
        threads[rank, stream, lane] = thread = len([key for key in threads if key[0] == rank]) + 1
        label = stream if lane == 0 else f"{stream} ({lane + 1})"
        events.append(_meta("thread_name", rank, thread, {"name": label}))
    where: dict[tuple[int, str, float, float, str], int] = {}
    for span, lane in lanes:
        thread = threads[span.rank, span.stream, lane]
        where[span.rank, span.stream, span.start_s, span.end_s, span.name] = thread
        event = {
            "ph": "X",
            "name": span.name,
            "cat": span.kind or "span",
            "pid": span.rank,
            "tid": thread,
            "ts": span.start_s * 1e6,
            "dur": span.seconds * 1e6,
        }
        if span.nbytes is not None:
            event["args"] = {"bytes": span.nbytes}
        events.append(event)
    for number, arrow in enumerate(timeline.arrows):
        times = (arrow.start_s, arrow.end_s, arrow.name)
        common = {"name": arrow.name, "cat": "arrow", "id": number}
        source = where.get((arrow.source, arrow.source_stream, *times), 1)
        destination = where.get((arrow.destination, arrow.destination_stream, *times), 1)
        events.append({"ph": "s", **common, "pid": arrow.source, "tid": source, "ts": arrow.start_s * 1e6})
        # "e": the arrow ends at the slice that holds this moment, which is the one that ends there.
        end = {"pid": arrow.destination, "tid": destination, "ts": arrow.end_s * 1e6}
        events.append({"ph": "f", "bp": "e", **common, **end})
    if timeline.counters:
        events += _counters(timeline.counters, max(timeline.ranks, default=-1) + 1)
    return {"displayTimeUnit": "ns", "otherData": {"name": timeline.name}, "traceEvents": events}


def write_perfetto(timeline: Timeline, path: Path) -> None:
    """Write the document to a file, whole.

    Raises:
        OSError: if that fails.
    """
    write_asked(path, json.dumps(to_perfetto(timeline), separators=(",", ":")) + "\n")


def _meta(name: str, pid: int, tid: int, values: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": values}


def _counters(counters: tuple[Counter, ...], pid: int) -> list[dict[str, Any]]:
    events = [
        _meta("process_name", pid, 0, {"name": "links"}),
        _meta("process_sort_index", pid, 0, {"sort_index": pid}),
    ]
    for counter in counters:
        for time, value in zip(counter.times_s, counter.values, strict=True):
            events.append({"ph": "C", "name": counter.name, "pid": pid, "ts": time * 1e6, "args": {"value": value}})
    return events


def _lanes(spans: tuple[Span, ...]) -> list[tuple[Span, int]]:
    """Return each span with the first lane of its stream that is free when it begins; by rank, stream and time."""
    free: dict[tuple[int, str], list[float]] = {}
    placed = []
    for span in sorted(spans, key=lambda one: (one.rank, one.stream, one.start_s, -one.end_s, one.name)):
        ends = free.setdefault((span.rank, span.stream), [])
        lane = next((index for index, end in enumerate(ends) if end <= span.start_s), len(ends))
        if lane == len(ends):
            ends.append(0.0)
        ends[lane] = span.end_s
        placed.append((span, lane))
    return placed
