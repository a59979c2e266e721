"""Of hundreds of mutated schedules of the registry the verifier reports those that break their contract, no others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.algorithms import algorithms
from hocket.schedule import KINDS, Collective, Schedule, verify

from ..schedule.brute_force import keeps_contract
from ..schedule.test_verify import mutate

ROOTED = ("reduce", "broadcast", "gather", "scatter")


@st.composite
def schedules(draw: Any) -> Schedule:
    """Any algorithm for any collective of 2 to 7 ranks that it serves."""
    one = draw(st.sampled_from(algorithms()))
    kind = draw(st.sampled_from(one.kinds))
    assert kind in KINDS
    world = draw(st.integers(2, 7 if kind != "all_to_all" else 4))
    collective = Collective(kind, world, draw(st.integers(0, world - 1)) if kind in ROOTED else 0)
    variants = [v for v in (*one.variants, {"local": 2}) if one.serves(collective, **v) is None]
    if not variants:
        return draw(schedules())
    return one(collective, **draw(st.sampled_from(variants)))


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(schedules(), st.sampled_from(["drop", "duplicate", "reorder", "redirect", "verb"]), st.data())
def test_what_the_verifier_says_is_what_trying_all_orders_says(schedule: Schedule, how: str, data: Any) -> None:
    if schedule.chunks * schedule.transfer_count > 40_000:
        return  # a double tree of 256 pieces; the naive interpreter would take minutes
    mutant = mutate(schedule, how, data.draw)
    assert any(finding.breaks for finding in verify(mutant)) == (not keeps_contract(mutant)), str(mutant)
