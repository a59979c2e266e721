"""Runs of a model that leave no trace."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from hocket.parallel.batches import undisturbed
from hocket.workload.division import unchanged


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


class Hooked(nn.Module):
    """Registers a hook when it is run first, as models of transformers do that collect hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.hidden: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "hooked"):
            self.hooked = True
            self.inner.register_forward_hook(lambda *given: self.hidden.append(given[2]))
        self.hidden.clear()
        self.inner(x)
        return torch.stack(self.hidden)


def test_hooks_that_a_first_run_registers_are_there_once() -> None:
    model = Hooked()
    for block in (lambda: undisturbed([model]), lambda: unchanged(model)):
        for _ in range(2):
            with block():
                model(torch.rand(3, 2))
        assert not model.inner._forward_hooks
    assert len(model(torch.rand(3, 2))) == 1
    lazy = nn.LazyLinear(2)
    with unchanged(lazy):
        lazy(torch.rand(3, 2))
    assert lazy(torch.rand(3, 2)).shape == (3, 2)
