"""Timelines read back from what was written for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hocket.timeline import (
    Counter,
    Span,
    Timeline,
    TimelineError,
    compare,
    from_perfetto,
    read_perfetto,
    to_perfetto,
    write_perfetto,
)

SPANS = (
    Span(0, "compute", "forward", 0.0, 0.5, "compute"),
    Span(0, "network", "bucket 0", 0.25, 0.75, "collective", 1e6),
    Span(0, "network", "bucket 1", 0.5, 1.0, "collective", 1e6),  # overlaps: a second lane of the stream
    Span(3, "compute", "forward", 0.0, 0.625, "compute"),
)
WRITTEN = Timeline("a run", SPANS, counters=(Counter("link", (0.0, 0.5), (1.0, 0.0)),), names={3: "host b"})


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_perfetto(WRITTEN, path)
    found = read_perfetto(path)
    assert (found.name, found.names, found.counters) == (WRITTEN.name, WRITTEN.names, WRITTEN.counters)
    key = lambda one: (one.rank, one.stream, one.name)  # noqa: E731
    assert sorted(found.spans, key=key) == sorted(WRITTEN.spans, key=key)
    assert compare(WRITTEN, found).error == pytest.approx(0.0)


def test_a_trace_without_a_name_has_that_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    path.write_text(json.dumps(to_perfetto(WRITTEN)["traceEvents"]))
    assert read_perfetto(path).name == "o.json"


def test_a_plain_list_of_events_is_a_trace_too() -> None:
    events = to_perfetto(WRITTEN)["traceEvents"]
    assert len(from_perfetto(events, "other").spans) == len(SPANS)
    foreign = from_perfetto([{"ph": "X", "name": "op", "ts": 1.0, "dur": 2.0, "tid": "stream 7"}])
    assert foreign.spans[0].stream == "stream 7"
    assert foreign.seconds == pytest.approx(2e-6)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "has no list `traceEvents`"),
        ([{"ph": "X", "name": "op", "ts": 1.0}], "an event lacks 'dur'"),
        ([17], "this is no trace"),
    ],
)
def test_what_is_no_trace_is_refused(document: object, said: str) -> None:
    with pytest.raises(TimelineError, match=said):
        from_perfetto(document)


def test_files_that_are_not_there_or_not_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TimelineError, match="cannot be read: No such file"):
        read_perfetto(tmp_path / "nowhere.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(TimelineError, match="is not JSON"):
        read_perfetto(tmp_path / "bad.json")
