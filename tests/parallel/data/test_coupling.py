"""Which losses are more than sums of terms of one sample each."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.parallel.data._coupling import samples_meet


@given(samples=st.integers(2, 6), each=st.integers(1, 9), stacked=st.booleans())
def test_rows_of_one_sample_may_meet_and_those_of_two_may_not(samples: int, each: int, stacked: bool) -> None:
    """A sample has several rows: its tokens, side by side, or one in each of several views."""
    rows = torch.rand(samples * each, 3, dtype=torch.float64, requires_grad=True) * 1.0
    of_samples = rows.sum(1).view(each, samples).T if stacked else rows.sum(1).view(samples, each)
    assert not samples_meet(of_samples.sum(1).square().mean(), [rows], samples)
    assert samples_meet(of_samples.sum(1).mean().square(), [rows], samples)


@pytest.mark.parametrize("samples", [1, 3])
def test_nothing_is_found_where_rows_are_not_the_samples(samples: int) -> None:
    rows = torch.rand(4, requires_grad=True) * 1.0
    assert not samples_meet(rows.mean().square(), [rows], samples)
