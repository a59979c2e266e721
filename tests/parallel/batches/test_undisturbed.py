"""Runs of a model that leave no trace."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from hocket.parallel.batches import undisturbed


def test_generators_that_a_module_holds_are_put_back() -> None:
    module: Any = nn.Linear(1, 1)
    module.of_torch, module.of_python = torch.Generator().manual_seed(1), random.Random(1)
    module.of_numpy, module.older = np.random.default_rng(1), np.random.RandomState(1)

    def drawn() -> list[float]:
        one = float(torch.rand((), generator=module.of_torch))
        return [one, module.of_python.random(), module.of_numpy.random(), module.older.rand()]

    with undisturbed([nn.Sequential(module)]):
        first = drawn()
        assert drawn() != first
    assert drawn() == first
