"""Streams time what the simulator finds for computation of a step, piece by piece."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.cluster import load
from hocket.simulate import StepGraph, Stream, Work, simulate_step

pieces = st.lists(
    st.tuples(st.sampled_from(["compute", "link"]), st.floats(0, 2), st.lists(st.integers(0, 30), max_size=3)),
    min_size=1,
    max_size=25,
)


@settings(deadline=None, max_examples=100)
@given(pieces)
def test_what_is_added_to_streams_ends_when_the_simulator_says(program: list[tuple[str, float, list[int]]]) -> None:
    streams = {"compute": Stream(), "link": Stream()}
    graph, works, ends = StepGraph(1), list[Work](), list[float]()
    for stream, seconds, wanted in program:
        needs = [number for number in wanted if number < len(works)]
        works.append(graph.compute(0, seconds, stream=stream, after=[works[number] for number in needs]))
        ends.append(streams[stream].add(seconds, max((ends[number] for number in needs), default=0.0)))
    timing = simulate_step(graph, load("star:hosts=2"))
    assert [timing.end_s[int(work.nodes[0])] for work in works] == pytest.approx(ends)
    assert timing.seconds == pytest.approx(max(stream.free_s for stream in streams.values()))
