"""Timelines: what overlaps counts once, Perfetto's rules are kept, and comparisons show what differs."""

import json
from pathlib import Path

import pytest

from hocket.timeline import Arrow, Counter, Span, Timeline, compare, to_perfetto, write_perfetto

SMALL = Timeline(
    "small",
    (
        Span(0, "compute", "forward", 0.0, 1.0, "compute"),
        Span(0, "compute", "backward", 1.0, 3.0, "compute"),
        Span(0, "network", "bucket 0", 2.0, 3.5, "collective", 1e6),
        Span(0, "network", "bucket 1", 3.0, 4.0, "collective", 1e6),
        Span(1, "compute", "forward", 0.0, 2.0, "compute"),
    ),
    (Arrow("bucket 0", 0, "network", 2.0, 1, "compute", 2.0),),
    (Counter("a->b (B/s)", (0.0, 2.0), (0.0, 5e8)),),
    {1: "spare"},
)


def test_what_overlaps_counts_once() -> None:
    assert SMALL.busy_s(0) == 4.0
    assert SMALL.busy_s(0, "collective") == 2.0
    assert SMALL.exposed_s(0) == 1.0
    assert SMALL.exposed_s(1) == 0.0
    assert SMALL.seconds == 4.0
    assert SMALL.ranks == (0, 1)
    assert Timeline("empty").seconds == 0.0


def test_perfetto_s_document_has_processes_threads_slices_arrows_and_counters() -> None:
    events = to_perfetto(SMALL)["traceEvents"]
    names = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"}
    assert names == {(0, "rank 0"), (1, "spare"), (2, "links")}
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 5
    assert {event["ts"] for event in slices} == {0.0, 1e6, 2e6, 3e6}
    assert [event["args"] for event in slices if event["name"] == "bucket 0"] == [{"bytes": 1e6}]
    arrows = [event for event in events if event["ph"] in "sf"]
    assert [(event["ph"], event["pid"], event["ts"], event["id"]) for event in arrows] == [
        ("s", 0, 2e6, 0),
        ("f", 1, 2e6, 0),
    ]
    assert [event["args"]["value"] for event in events if event["ph"] == "C"] == [0.0, 5e8]


def test_slices_of_one_thread_do_not_overlap() -> None:
    events = [event for event in to_perfetto(SMALL)["traceEvents"] if event["ph"] == "X"]
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))
    assert len(threads) == 4  # compute, network and its second lane on rank 0, compute on rank 1


def test_equal_timelines_are_written_as_equal_bytes(tmp_path: Path) -> None:
    write_perfetto(SMALL, tmp_path / "a.json")
    write_perfetto(Timeline("small", SMALL.spans[::-1], SMALL.arrows, SMALL.counters, SMALL.names), tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert json.loads((tmp_path / "a.json").read_text())["otherData"] == {"name": "small"}


def test_a_comparison_shows_the_whole_then_kinds_then_what_differs_most() -> None:
    slower = Timeline(
        "slower", tuple(Span(s.rank, s.stream, s.name, 2 * s.start_s, 2 * s.end_s, s.kind) for s in SMALL.spans)
    )
    comparison = compare(SMALL, slower)
    assert comparison.error == pytest.approx(1.0)
    assert [(row.kind, row.name) for row in comparison.rows] == [
        ("whole", ""),
        ("collective", ""),
        ("collective", "bucket 0"),
        ("collective", "bucket 1"),
        ("compute", ""),
        ("compute", "forward"),
        ("compute", "backward"),
    ]
    assert all(row.ratio == pytest.approx(2.0) for row in comparison.rows)
    assert "bucket 0" in str(comparison)


def test_numbered_steps_and_operations_of_a_run_are_one_row_each_and_what_overlaps_counts_once() -> None:
    spans = [Span(0, "steps", f"step {i}", float(i), i + 1.0, "step") for i in range(3)]
    spans += [Span(0, "g", f"bucket 0 #{i} (shm)", float(i), i + 0.5, "collective") for i in range(3)]
    spans += [Span(0, "phases", "data", 0.0, 1.0, "phase"), Span(0, "phases", "data", 0.25, 0.75, "phase")]
    rows = compare(Timeline("run", tuple(spans)), Timeline("run", tuple(spans))).rows
    assert [(row.kind, row.name, row.first_s) for row in rows] == [
        ("whole", "", 3.0),
        ("collective", "", 1.5),
        ("collective", "bucket 0 (shm)", 1.5),
        ("phase", "", 1.0),
        ("phase", "data", 1.0),
        ("step", "", 3.0),
    ]


def test_what_one_of_two_lacks_is_shown() -> None:
    rows = {(row.kind, row.name): row.ratio for row in compare(Timeline("none"), SMALL).rows}
    assert rows["compute", "forward"] == float("inf")
    assert compare(Timeline("none"), Timeline("none")).error == 0
