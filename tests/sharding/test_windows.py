"""The arithmetic of shards and windows, without ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hocket.sharding import Shard, SlidingWindow, halo_nbytes, halo_rows

windows = st.builds(
    SlidingWindow, st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 6), st.integers(0, 6)
)


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    """Of any lengths, also none."""
    lengths = draw(st.lists(st.integers(0, 7), min_size=2, max_size=5))
    assume(sum(lengths))
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return Shard(0, (tuple(bounds),))


@given(shards(), windows)
@settings(deadline=None, max_examples=200)
def test_outputs_are_torchs_and_need_what_their_definition_says(inputs: Shard, window: SlidingWindow) -> None:
    assume(window.outputs(inputs.size) > 0)
    x = torch.arange(inputs.size, dtype=torch.float64).view(1, 1, -1).requires_grad_()
    padded = F.pad(x, (window.low, window.high))
    y = F.conv1d(padded, torch.ones(1, 1, window.kernel).double(), stride=window.stride, dilation=window.dilation)
    outputs = window.divide(inputs)
    assert outputs.size == y.shape[2]
    assert list(outputs.bounds[0]) == sorted(outputs.bounds[0])
    rows = halo_rows(inputs, [window.needed(one) for one in outputs.intervals()])
    for rank in range(inputs.ranks):
        begin, end = outputs.intervals()[rank]
        used = set()
        if begin < end:
            (gradient,) = torch.autograd.grad(y[0, 0, begin:end].sum(), x, retain_graph=True)
            used = set(gradient[0, 0].nonzero().view(-1).tolist())
        low, high = window.needed((begin, end))
        held = set(range(max(0, low), min(inputs.size, high)))
        assert used <= held
        if window.stride == 1 or window.dilation == 1:  # else rows between may go unused
            gaps = window.stride > window.reach or window.dilation > 1
            assert used == held or gaps
        assert rows[rank] == len(held - set(range(*inputs.intervals()[rank])))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("kernel", "dilation"), [(3, 1), (5, 1), (3, 2), (1, 1)])
def test_a_convolution_that_keeps_the_size_sends_its_padding_across_each_border(
    ranks: int, kernel: int, dilation: int
) -> None:
    low = dilation * (kernel - 1) // 2
    window = SlidingWindow(kernel, 1, dilation, low, low)
    expected = (ranks - 1) * dilation * (kernel - 1) * 160
    assert halo_nbytes(Shard.even(0, 23, ranks), window, 160) == expected


def test_an_output_belongs_to_the_owner_of_the_middle_of_its_window() -> None:
    inputs = Shard(2, ((0, 5, 9),))
    assert SlidingWindow(3, 1, 1, 1, 1).divide(inputs).bounds == ((0, 5, 9),)
    assert SlidingWindow(3, 2, 1, 1, 1).divide(inputs).bounds == ((0, 3, 5),)
    assert SlidingWindow(2, 2).divide(inputs).bounds == ((0, 3, 4),)
    assert SlidingWindow(3).divide(inputs).bounds == ((0, 4, 7),)
    assert halo_rows(inputs, [SlidingWindow(2, 2).needed(one) for one in ((0, 3), (3, 4))]) == [1, 0]


def test_even_shards_give_the_first_ranks_one_index_more() -> None:
    assert Shard.even(0, 11, 3).bounds == ((0, 4, 8, 11),)
    assert Shard.even(0, 2, 3).intervals() == [(0, 1), (1, 2), (2, 2)]
