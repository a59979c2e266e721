"""Parameters that a reducer must leave alone, because every rank holds another part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

_ATTRIBUTE = "_hocket_keeper"


class Keeper(Protocol):
    """Who brings the gradients of such parameters to where they belong."""

    def weigh_by(self, weight: Callable[[], float]) -> None:
        """Has this rank's gradients count `weight()` times in the average over ranks, asked in each backward pass."""


def set_apart(parameter: torch.nn.Parameter, keeper: Keeper) -> None:
    """Takes a parameter out of what data-parallel ranks hold alike."""
    setattr(parameter, _ATTRIBUTE, keeper)


def is_apart(parameter: torch.Tensor) -> bool:
    """Whether ranks hold different parts of the parameter."""
    return hasattr(parameter, _ATTRIBUTE)


def keepers(module: torch.nn.Module) -> Iterator[Keeper]:
    """Those who keep parameters of a module, each once."""
    found = [getattr(p, _ATTRIBUTE) for p in module.parameters() if is_apart(p)]
    yield from {id(keeper): keeper for keeper in found}.values()
