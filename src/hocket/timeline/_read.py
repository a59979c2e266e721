"""Reading timelines back from the JSON that `write_perfetto` wrote, or that another tool wrote in the same format."""

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from ._timeline import Counter, Span, Timeline


class TimelineError(ValueError):
    """A file is no timeline; the message says where and what is expected."""


def read_perfetto(path: str | Path) -> Timeline:
    """Return the timeline of a file; its name is the document's, or the file's.

    Raises:
        TimelineError: the file cannot be read, or holds no trace events.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise TimelineError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise TimelineError(f"{str(path)!r} is not JSON: {error}") from None
    return from_perfetto(document, Path(path).name)


def from_perfetto(document: Any, name: str = "trace") -> Timeline:
    """Return the spans and counters of a document of the Trace Event Format; arrows are left out.

    Processes are ranks and threads streams. A span's kind is its category.

    Args:
        document: An object with `traceEvents`, or the list of events itself.
        name: Name of the timeline, if the document has none.

    Raises:
        TimelineError: there are no events, or one lacks a time.
    """
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise TimelineError(f"{name}: has no list `traceEvents`; write one with `hocket simulate ... --trace FILE`")
    if isinstance(document, dict):
        name = str(document.get("otherData", {}).get("name", name))
    streams: dict[tuple[int, str], str] = {}
    ranks: dict[int, str] = {}
    spans: list[Span] = []
    counters: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    try:
        for event in events:
            kind, rank = event["ph"], int(event.get("pid", 0))
            if kind == "M" and event["name"] == "thread_name":
                # Streams whose spans overlap are several threads, "network" and "network (2)".
                streams[rank, str(event["tid"])] = event["args"]["name"].partition(" (")[0]
            elif kind == "M" and event["name"] == "process_name":
                ranks[rank] = event["args"]["name"]
            elif kind == "X":
                start = float(event["ts"]) * 1e-6
                nbytes = event.get("args", {}).get("bytes")
                stream, label = str(event.get("tid", "")), str(event["name"])
                end = start + float(event["dur"]) * 1e-6
                spans.append(Span(rank, stream, label, start, end, str(event.get("cat", "")), nbytes))
            elif kind == "C":
                value = float(next(iter(event["args"].values())))
                counters[str(event["name"])].append((float(event["ts"]) * 1e-6, value))
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise TimelineError(f"{name}: an event lacks {error}; this is no trace of the Trace Event Format") from None
    named = [dataclasses.replace(one, stream=streams.get((one.rank, one.stream), one.stream)) for one in spans]
    used = {one.rank for one in spans}
    other = {rank: label for rank, label in ranks.items() if rank in used and label != f"rank {rank}"}
    lines = tuple(
        Counter(label, tuple(at for at, _ in sorted(values)), tuple(value for _, value in sorted(values)))
        for label, values in counters.items()
    )
    return Timeline(name, tuple(named), (), lines, other)
