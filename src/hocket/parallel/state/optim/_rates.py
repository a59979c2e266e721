"""Learning rates for large batches: how they grow with the batch, and how they begin and end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim.lr_scheduler import LambdaLR


def scaled(lr: float, batch: int, base_batch: int, rule: Literal["linear", "sqrt"] = "linear") -> float:
    """Return the rate for a batch, from one that is good for another.

    Args:
        lr: Learning rate that is good for `base_batch`.
        batch: Samples of a global batch.
        base_batch: Samples of the batch that `lr` is good for.
        rule: "linear", in proportion to the batch, as for SGD and LARS (Goyal et al. 2017); "sqrt", to its root, which
            keeps the variance of an update (Krizhevsky 2014), as for LAMB (You et al. 2020).

    Raises:
        ValueError: a batch is not positive, or there is no such rule.
    """
    if batch < 1 or base_batch < 1:
        raise ValueError(f"batches have 1 sample or more, not {min(batch, base_batch)}")
    if rule not in ("linear", "sqrt"):
        raise ValueError(f'rule must be "linear" or "sqrt", not {rule!r}')
    factor = batch / base_batch
    return lr * (factor if rule == "linear" else math.sqrt(factor))


@dataclass
class _Factor:
    """By what the rate is multiplied in a step; an object whose `__dict__` LambdaLR puts into its state."""

    begin: int
    total: int | None
    power: float
    start: float
    end: float

    def __call__(self, step: int) -> float:
        if step < self.begin:
            return self.start + (1 - self.start) * (step + 1) / self.begin
        if self.total is None:
            return 1.0
        left = 1 - min(step - self.begin, self.total - self.begin) / (self.total - self.begin)
        return float(self.end + (1 - self.end) * left**self.power)


def warmup(
    optimizer: Any, steps: int, *, total: int | None = None, power: float = 2.0, start: float = 0.0, end: float = 0.0
) -> LambdaLR:
    """Return a schedule that raises the rate step by step to what the optimizer was given, then lets it fall.

    Raising it gradually is from Goyal et al. 2017; falling by a polynomial from the papers of LARS (power 2) and LAMB
    (power 1). Call the schedule's `step` after each step of training.

    Args:
        optimizer: A torch optimizer with the rate at its highest.
        steps: Steps of warm-up; the last of them is the first with the full rate. 0 for none.
        total: Steps of training, with those of warm-up; None to stay at the full rate.
        power: Power of the polynomial by which the rate falls.
        start: The part of the rate from which it is raised.
        end: The part of the rate at which it ends.

    Raises:
        ValueError: there are not more steps in all than of warm-up.
    """
    if steps < 0 or (total is not None and total <= steps):
        raise ValueError(f"warm-up takes 0 steps or more, and fewer than all: not {steps} of {total}")
    return LambdaLR(optimizer, _Factor(steps, total, power, start, end))


def polynomial(optimizer: Any, total: int, *, power: float = 2.0, end: float = 0.0) -> LambdaLR:
    """Return a schedule that lets the rate fall by a polynomial over `total` steps: `warmup` without warm-up."""
    return warmup(optimizer, 0, total=total, power=power, end=end)
