"""Ranks whose strings hash differently hold the parameters of a stage in one order, in which gradients are averaged."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import subprocess
import sys

import pytest

from hocket.testing import deadline

PROGRAM = """
import torch
from torch import nn
from hocket.parallel.pipeline import split

model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(8)))
for stage in split(model, 2, (torch.ones(2, 4),), points=['4']):
    print(*(name for name, _ in stage.module.named_parameters()))
"""

NAMES = ("full", "sliding", "local", "global")
OF_A_SET = """
import torch
from torch import nn
from hocket.parallel.pipeline import order_digest, split

class Rates(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        for number, name in enumerate(NAMES):
            self.register_buffer(name, torch.full((4,), float(number)))

    def forward(self, x):
        x = self.first(x)
        waves = {name: torch.cos(getattr(self, name) * x) for name in ORDER(NAMES)}
        return self.last(sum(waves[name] for name in NAMES))

for ORDER in (sorted, set):
    print(order_digest(split(Rates(), 2, (torch.ones(2, 4),), points=['last'])))
"""


@pytest.mark.long
def test_the_order_of_a_stages_parameters_does_not_depend_on_hashes() -> None:
    """They were averaged with other parameters' where each rank is a process of its own; ranks of tests are forks."""
    said = [orders for orders, _ in of_processes()]
    assert said[0] == said[1] != ""


@functools.cache
def of_processes() -> list[list[str]]:
    """What this process and another one print by the two programs; a set of the second has another order in each."""
    programs = f"{PROGRAM}\nprint('and then')\nNAMES = {NAMES}\n{OF_A_SET}"
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(programs, {"__name__": "__main__"})
    return [said.split("and then\n") for said in (here.getvalue(), printed(programs, other_seed()))]


def printed(program: str, seed: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, *options, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True,
        text=True, check=True, timeout=deadline(60),
    )  # fmt: skip
    return done.stdout


def other_seed() -> str:
    """Of the hashes of a process whose set of the second program's names has another order than this one's."""
    seeds = map(str, itertools.count(1))
    return next(seed for seed in seeds if printed(f"print(*set({NAMES}))", seed, "-S").split() != [*set(NAMES)])


@pytest.mark.long
def test_steps_in_the_order_of_a_set_are_told_from_those_in_a_fixed_order() -> None:
    fixed, of_set = zip(*(digests.split() for _, digests in of_processes()), strict=True)
    assert len(set(fixed)) == 1
    assert len(set(of_set)) > 1
