"""What joins the ranks of a pipeline is measured, and decides where a model is cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hocket.parallel.compose._divide import _micro_batch
from hocket.parallel.mesh._links import link_of
from hocket.parallel.mesh.world import current
from hocket.parallel.pipeline import split
from hocket.planner import Link
from hocket.testing import deadline, run_ranks


def measure_it() -> tuple[float, float]:
    world = current()
    first = link_of(world, world, torch.device("cpu"))
    assert link_of(world, world, torch.device("cpu")) is first  # two measurements would differ
    return tuple(first)


def test_all_ranks_agree_about_a_link_that_carries_something() -> None:
    found = run_ranks(measure_it, 3)
    assert len(set(found)) == 1
    rate_Bps, latency_s = found[0]
    assert rate_Bps > 1e7
    assert 1e-7 <= latency_s < deadline(0.1)


def test_a_slow_link_moves_the_cut_to_where_few_bytes_cross() -> None:
    # Four equal layers, and a narrow place before the last of them.
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 4), nn.Linear(4, 256))
    sample = (torch.randn(64, 256),)
    times = [1e-3] * 4

    def first_of_second(link: Link) -> tuple[str, ...]:
        return split(model, 2, sample, times=times, link=link)[1].layers

    assert first_of_second(Link(1e12, 0.0)) == ("2", "3")
    assert first_of_second(Link(1e6, 0.0)) == ("3",)


@pytest.mark.parametrize(("samples", "parts", "each"), [(64, 8, 8), (64, 3, 21), (64, 64, 2), (3, 8, 2), (1, 4, 1)])
def test_stages_are_cut_by_what_a_micro_batch_of_the_sample_asks_for(samples: int, parts: int, each: int) -> None:
    words, weights = torch.zeros(samples, 5), torch.ones(7)
    part, whole = _micro_batch((words, weights), parts)
    assert part.shape == (each, 5)  # of two samples at the least, if there are as many: batch norm wants two
    assert whole is weights
