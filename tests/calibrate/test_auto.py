"""An automatic plan, before anything is measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hocket.calibrate import auto_plan
from hocket.planner import PlanError


def test_a_sample_with_targets_and_fewer_samples_than_workers_is_refused_with_what_to_pass() -> None:
    model, image = nn.Conv2d(3, 4, 3), torch.ones(1, 3, 8, 8)
    world: Any = SimpleNamespace(size=2, rank=0)
    with pytest.raises(PlanError, match="has 1 of the global batch's samples.* without targets"):
        auto_plan(model, torch.optim.SGD(model.parameters()), (image, torch.ones(1)), world)


def test_a_word_of_the_environment_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wrote `none` had a calibration taken and kept."""
    monkeypatch.setenv("HOCKET_CALIBRATION", "none")
    model, world = nn.Linear(3, 4), SimpleNamespace(size=2, rank=0, first=lambda one: one)
    with pytest.raises(PlanError, match="HOCKET_CALIBRATION=none: there is no such word; write again, off, keep"):
        auto_plan(model, torch.optim.SGD(model.parameters()), torch.ones(4, 3), world)  # type: ignore[arg-type]
