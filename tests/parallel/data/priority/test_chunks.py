"""Chunks cover all gradients once, and are sent as a queue by priority with credit would send them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.parallel.data.priority import cut, order


@given(st.lists(st.integers(0, 40), max_size=9), st.integers(1, 100), st.data())
@settings(deadline=None, max_examples=150)
def test_every_element_is_in_one_chunk_in_the_order_of_need(numels: list[int], most: int, data: st.DataObject) -> None:
    numbers = data.draw(st.permutations(range(len(numels))))
    kinds = [data.draw(st.sampled_from("ab")) for _ in numels]
    sizes = [4 if kind == "a" else 8 for kind in kinds]
    chunks = cut(numbers, numels, sizes, kinds, most)
    met = [(n, i) for chunk in chunks for n, begin, end in chunk.stretches for i in range(begin, end)]
    assert met == [(n, i) for n in numbers for i in range(numels[n])]
    for chunk in chunks:
        assert len({kinds[n] for n, _, _ in chunk.stretches}) == 1
        assert chunk.nbytes == sum((end - begin) * sizes[n] for n, begin, end in chunk.stretches)
        assert chunk.nbytes <= max(most, 8)


def test_small_gradients_go_together_and_large_ones_in_parts() -> None:
    chunks = cut([2, 0, 1], [10, 3, 2], [4, 4, 4], ["f"] * 3, 24)
    assert [c.stretches for c in chunks] == [((2, 0, 2), (0, 0, 4)), ((0, 4, 10),), ((1, 0, 3),)]


def test_all_that_is_ready_goes_by_urgency() -> None:
    assert order([0.0] * 5, [10] * 5, 1.0, 20) == [0, 1, 2, 3, 4]


def test_what_is_ready_later_overtakes_what_has_not_been_sent() -> None:
    # Back-propagation makes chunk 3 first; one takes a second, and a gradient is made every 0.4 s.
    ready = [1.2, 0.8, 0.4, 0.0]
    assert order(ready, [10] * 4, 10.0, 10) == [3, 1, 0, 2]
    # With more credit more has been handed over when the urgent ones come.
    assert order(ready, [10] * 4, 10.0, 40) == [3, 2, 1, 0]


def test_a_fast_link_sends_in_the_order_of_back_propagation() -> None:
    assert order([3.0, 2.0, 1.0, 0.0], [10] * 4, 1e9, 20) == [3, 2, 1, 0]


@given(
    st.lists(st.tuples(st.floats(0, 9), st.integers(1, 50)), min_size=1, max_size=12),
    st.floats(0.1, 1e3),
    st.integers(1, 120),
)
@settings(deadline=None, max_examples=150)
def test_every_chunk_is_sent_once_whatever_the_times(chunks: list[tuple[float, int]], rate: float, credit: int) -> None:
    found = order([ready for ready, _ in chunks], [nbytes for _, nbytes in chunks], rate, credit)
    assert sorted(found) == list(range(len(chunks)))
    if credit == 1:  # one at a time: whoever goes before a more urgent one was ready before that
        for place, chunk in enumerate(found[1:], start=1):
            later = [other for other in found[place:] if chunks[other][0] == 0.0]
            assert not later or chunk <= min(later) or chunks[chunk][0] > 0.0 or found[0] == chunk
