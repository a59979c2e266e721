"""The Trainer with samples divided: losses, norms, evaluation, weights and statistics are those of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hocket.planner import Plan
from hocket.testing import run_ranks

from . import models

TOLERANCE = 1e-9


@functools.cache
def one_process(name: str, optimizer: str) -> dict[str, Any]:
    return models.train(name, Plan(clip_norm=0.5), optimizer)


def runs(spatial: int) -> list[tuple[str, Plan, str]]:
    plan = functools.partial(Plan, spatial_parallel_degree=spatial, sync_batch_norm=True, clip_norm=0.5)
    return [
        ("unet", plan(), "SGD"),
        ("unet", plan(shard="optimizer"), "Adam"),
        ("volumes", plan(shard="gradients", bucket_bytes=500), "Adam"),
        ("volumes", plan(), "SGD"),
    ]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ranks", "spatial"), [(2, 2), *(pytest.param(*one, marks=pytest.mark.long) for one in ((3, 3), (4, 2)))]
)
def test_training_on_slabs_is_that_of_one_process(ranks: int, spatial: int) -> None:
    wanted = runs(spatial)
    found = run_ranks(models.train_all, ranks, wanted, timeout_s=110)
    for i, (name, plan, optimizer) in enumerate(wanted):
        expected = one_process(name, optimizer)
        for rank in found:
            got = rank[i]
            assert got["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE), (name, plan)
            assert got["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
            assert got["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-6)
            assert float((got["output"] - expected["output"]).abs().max()) < 1e-8
            for key, value in expected["state"].items():
                assert float((got["state"][key] - value).abs().max()) < 1e-8, (name, key)
    place = found[-1][0]["report"]["place"]
    assert place == {"pipeline": 0, "data": ranks // spatial - 1, "tensor": 0, "spatial": spatial - 1}
    assert "flatten" in " ".join(found[0][3]["report"]["notes"])


@pytest.mark.long
def test_parts_of_a_batch_are_weighted_by_the_labels_that_count_on_all_slabs() -> None:
    expected = models.train_on_labels(Plan())
    plan = Plan(spatial_parallel_degree=2, accumulate=2)
    for rank in run_ranks(models.train_on_labels, 2, plan):
        for name, losses in expected.items():
            assert rank[name] == pytest.approx(losses, rel=TOLERANCE), name
