"""The table itself: by every rule, a call on shards is the call on full tensors, forward and backward.

Calls are those of torch's own database of operators with their samples, on ranks in one process.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hocket.sharding import RULES, rule_for

from .samples import ASKING, RANDOM, operators, samples
from .trial import compare, trials

DTYPES = (torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)
# Their results are not determined, or differ with the memory that they find.
UNDETERMINED = {"empty_like", "native_dropout_backward"}


def accepted(name: str, examples: int) -> int:
    """How many of random calls of an operator were made on shards; all are compared."""
    count = 0

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, phases=(Phase.generate,),
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.data())
    def attempt(data: st.DataObject) -> None:
        nonlocal count
        found = samples(name, data.draw(st.sampled_from(DTYPES)))
        if not found:
            return
        trial = data.draw(trials(data.draw(st.sampled_from(found))))
        if trial is not None:
            count += compare(trial)

    attempt()
    return count


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks are threads themselves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# The kernel of grouped_mm takes few types and strides, hardly ever those that are drawn.
BY_RULES = sorted(set(RULES) - ASKING - RANDOM - {"grouped_mm"})


def element_wise() -> list[str]:
    return [one for one in operators() if rule_for(one) is RULES["pointwise"] and one not in UNDETERMINED]


@pytest.mark.parametrize("name", BY_RULES)
def test_a_call_on_shards_is_the_call_on_full_tensors(name: str) -> None:
    assert (
        accepted(name, 10) or accepted(name, 30) or accepted(name, 100)
    )  # some rules accept few of the database's samples


def test_so_are_calls_of_operators_that_torch_says_work_element_by_element() -> None:
    names = element_wise()
    assert len(names) > 100
    few = names[::8]  # of all in the long test
    assert {name for name in few if not (accepted(name, 2) or accepted(name, 12))} == set()


@pytest.mark.long
@pytest.mark.parametrize("name", BY_RULES)
def test_so_are_many_calls(name: str) -> None:
    assert accepted(name, 100)


@pytest.mark.long
def test_so_are_many_calls_element_by_element() -> None:
    assert {name for name in element_wise() if not (accepted(name, 6) or accepted(name, 12))} == set()
