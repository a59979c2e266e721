"""Messages of a pipeline under way, held against max-min fair flows that are worked out anew at every event."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.simulate import Usage, max_min
from hocket.simulate._messages import MessagesUnderWay

RATES_Bps = [1.0, 1.0, 4.0, 10.0, 0.5]  # of the links
Sent = tuple[float, float, tuple[int, ...]]  # when a message is sent, its bytes, and the links that it passes
MESSAGE = st.tuples(
    st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0]),
    st.floats(0.1, 10.0),
    st.sets(st.integers(0, len(RATES_Bps) - 1), min_size=1).map(lambda links: tuple(sorted(links))),
)


def ends(sent: list[Sent]) -> list[float]:
    """When each message is there, of all by themselves."""
    way, found = MessagesUnderWay(), [math.nan] * len(sent)
    for number, (at, nbytes, links) in enumerate(sent):
        path = [(link, nbytes / RATES_Bps[link]) for link in links]
        way.send(number, 0.0, at, path, number, nbytes)
    while way.next_s < math.inf:
        now, there = way.next_s, way.advance()
        if there is not None:
            found[there] = now
    return found


def ends_of_flows(sent: list[Sent]) -> list[float]:
    """The same by the definition: rates anew whenever one begins or ends."""
    left, found, now = [nbytes for _, nbytes, _ in sent], [math.nan] * len(sent), 0.0
    while any(math.isnan(end) for end in found):
        live = [n for n, (at, _, _) in enumerate(sent) if at <= now and math.isnan(found[n])]
        offsets = np.cumsum([0, *(len(sent[n][2]) for n in live)])
        links = np.array([link for n in live for link in sent[n][2]], dtype=np.int64)
        rates = max_min(Usage(offsets, links, np.ones(len(links))), np.array(RATES_Bps)) if live else np.zeros(0)
        begins = [at - now for at, _, _ in sent if at > now]
        step_s = min([*begins, *(left[n] / rate for n, rate in zip(live, rates, strict=True))])
        for n, rate in zip(live, rates, strict=True):
            left[n] -= rate * step_s
            if left[n] <= 1e-9:
                found[n] = now + step_s
        now += step_s
    return found


@given(st.lists(MESSAGE, min_size=1, max_size=7))
def test_messages_share_links_as_flows_do(sent: list[Sent]) -> None:
    assert ends(sent) == pytest.approx(ends_of_flows(sent), rel=1e-6, abs=1e-6)


def test_a_fast_link_on_the_way_gives_no_larger_part_of_a_slow_one() -> None:
    assert ends([(0.0, 1.0, (0, 3)), (0.0, 1.0, (0,))]) == pytest.approx([2.0, 2.0])
