"""Ranks whose strings hash differently hold the parameters of a stage in one order, in which gradients are averaged."""

from __future__ import annotations

import os
import subprocess
import sys

from hocket.testing import deadline

PROGRAM = """
import torch
from torch import nn
from hocket.parallel.pipeline import split

model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(8)))
for stage in split(model, 2, (torch.ones(2, 4),)):
    print(*(name for name, _ in stage.module.named_parameters()))
"""


def test_the_order_of_a_stages_parameters_does_not_depend_on_hashes() -> None:
    """They were averaged with other parameters' where each rank is a process of its own; ranks of tests are forks."""
    said = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True,
            text=True, check=True, timeout=deadline(60),
        ).stdout
        for seed in ("1", "2", "3")
    ]  # fmt: skip
    assert said[0] == said[1] == said[2] != ""
