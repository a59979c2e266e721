"""Automatic plans try the sizes of buckets near the solved one."""

from __future__ import annotations

import pytest
import torch

import hocket
from hocket.parallel.compose._bucket_trial import STEPS, BucketTrial
from hocket.parallel.compose._trainer import Trainer
from hocket.parallel.mesh.world import World
from hocket.planner import Plan
from hocket.testing import run_ranks

ALONE = World(0, 1, None)


def tried(solved: int | None, seconds: dict[int, float]) -> BucketTrial:
    """A trial in which a step with buckets of a size takes so long."""
    used: list[int] = []
    trial = BucketTrial(solved, default=64, total=640, resize=used.append, world=ALONE)
    for _ in range(STEPS):
        if trial.chosen is None:
            trial.step(seconds[used[-1]])
    assert used[-1] == trial.chosen
    return trial


def test_the_solved_size_stays_unless_another_is_clearly_better() -> None:
    assert tried(32, {32: 1.0, 16: 1.1, 64: 0.99}).chosen == 32
    assert tried(32, {32: 1.0, 16: 1.1, 64: 0.9}).chosen == 64
    assert tried(None, {64: 1.0, 32: 0.5, 128: 0.7}).chosen == 32


def test_sizes_that_make_as_many_buckets_are_tried_once() -> None:
    trial = BucketTrial(10_000, default=64, total=640, resize=lambda _: None, world=ALONE)
    assert trial.sizes == [10_000, 64]
    assert trial.to_json()["chosen"] is None
    alone = BucketTrial(10_000, default=9_000, total=640, resize=lambda _: None, world=ALONE)
    assert alone.chosen == 10_000


def losses(automatic: bool) -> tuple[list[float], dict[str, object] | None]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6))).double()
    x = torch.randn(8, 32, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters())
    trainer = hocket.Trainer(model, torch.nn.functional.mse_loss, optimizer, Plan())
    if automatic:
        form = trainer._composition.form
        total = sum(item.leaf.numel() * 8 for item in form.owned)
        trainer._trial = BucketTrial(None, total // 4, total, form.resize, trainer._mesh.whole)  # type: ignore[attr-defined]
    found = [float(trainer.step((x, -x))) for _ in range(STEPS + 4)]
    return found, trainer.report().get("buckets")


def without_and_with() -> list[tuple[list[float], dict[str, object] | None]]:
    return [losses(automatic) for automatic in (False, True)]


@pytest.mark.long
def test_losses_do_not_depend_on_the_trial() -> None:
    plain, trial = zip(*run_ranks(without_and_with, 2), strict=True)
    assert plain[0][1] is None
    assert trial[0][0] == pytest.approx(plain[0][0], rel=1e-12)
    assert trial[0][1] == trial[1][1]
    assert trial[0][1]["chosen"] in [row["bucket_bytes"] for row in trial[0][1]["tried"]]
    assert len({row["step_s"] for row in trial[0][1]["tried"]}) > 1


def test_a_trainer_with_a_plan_of_its_own_tries_nothing() -> None:
    model = torch.nn.Linear(2, 2)
    trainer = Trainer(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), Plan())
    assert trainer._trial is None
