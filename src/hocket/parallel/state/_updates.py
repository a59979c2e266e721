"""What an optimizer's update is like, as a copy of the optimizer shows on made-up parameters."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..batches import restored
from ..mesh import World
from .checkpoint import random_state, set_random_state

_STEPS = 3  # SOAP makes its basis in the first, and updates from the second on
_PLACE = 2.0**-52  # the last of a number in float64


@dataclass(frozen=True, slots=True)
class UpdateTrial:
    """What was found of an optimizer: nothing where its copy cannot step (it wants a closure, say)."""

    meets: bool = False  # whether the update of a parameter depends on others' gradients, as through a norm over all
    draws: bool = False  # whether it draws random numbers
    # how far apart the updates of a parameter are for gradients that differ in the last place, as part of the largest
    # update
    magnified: float = 0.0

    @classmethod
    def of(cls, optimizer: Any) -> UpdateTrial:
        """Return what is found; torch's own optimizers are known. The optimizer and its state are not touched."""
        if type(optimizer).__module__.startswith("torch.optim"):
            return cls()
        with restored(), torch.enable_grad():
            try:
                before, start = _stepped(optimizer, steps=0), random_state()
                usual, end = _stepped(optimizer), random_state()
                set_random_state(start)
                less = _stepped(optimizer, others=1e-3)
                set_random_state(start)
                more = _stepped(optimizer, others=1e3)
                set_random_state(start)
                rounded = _stepped(optimizer, noise=_PLACE)
            except Exception:
                return cls()
        pairs = [*zip(usual[::2], less[::2], strict=True), *zip(usual[::2], more[::2], strict=True)]
        meets = any(_apart(*pair) > 64 * _PLACE for pair in pairs)
        magnified = [_apart(a, b) / (_apart(a, c) + _PLACE) for a, b, c in zip(usual, rounded, before, strict=True)]
        return cls(meets, not _same(start, end), max(magnified, default=0.0))


def _stepped(optimizer: Any, *, steps: int = _STEPS, others: float = 1.0, noise: float = 0.0) -> list[torch.Tensor]:
    """Return made-up parameters after some steps of a copy of an optimizer.

    Gradients of every second parameter are multiplied by `others`, and all changed by a part of `noise`, at random.
    """
    generator, errors = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def numbers(*shape: int, source: torch.Generator = generator) -> torch.Tensor:
        return torch.rand(shape, generator=source, dtype=torch.float64)

    toys = [
        torch.nn.Parameter(numbers(*(min(n, 3) for n in p.shape)).to(p.dtype if p.is_complex() else torch.float64))
        for p in parameters
    ]
    replaced = {id(p): toy for p, toy in zip(parameters, toys, strict=True)}
    twin = object.__new__(type(optimizer))  # copied by torch, it would lack attributes that torch does not know
    attributes = {name: value for name, value in vars(optimizer).items() if not name.endswith("_hooks")}
    twin.__dict__.update(copy.deepcopy(attributes, {**replaced, id(optimizer.state): defaultdict(dict)}))
    twin.__dict__.update({name: type(value)() for name, value in vars(optimizer).items() if name not in attributes})
    for group in twin.param_groups:
        group["lr"] = group.get("lr") or 1e-3  # it may be 0 at the beginning of a warm-up
    for _ in range(steps):
        for i, toy in enumerate(toys):
            # Of rank one: so gradients of large layers are, nearly, where a batch has fewer samples than rows.
            toy.grad = torch.ones_like(toy) * (others if i % 2 else 1.0)
            for dim, size in enumerate(toy.shape):
                toy.grad *= numbers(size, *[1] * (toy.dim() - dim - 1))
            toy.grad *= 1 + noise * (numbers(*toy.shape, source=errors) * 4 - 2)
        type(twin).step(twin)  # an attribute of the optimizer, as schedules set it, is that of the one that was copied
    return [toy.detach() for toy in toys]


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference, 0 where there is none."""
    apart = (one - other).abs()
    return float(apart.nan_to_num().max()) if apart.numel() else 0.0


@contextmanager
def drawn_alike(world: World) -> Iterator[None]:
    """Open a block in which all ranks draw rank 0's random numbers; a collective operation.

    After it ranks go on with their own, which were others if batches were unlike, say, and the model has dropout.
    """
    mine = random_state()
    theirs = world.from_root(mine)
    if _same(mine, theirs):
        yield
        return
    set_random_state(theirs)
    try:
        yield
    finally:
        set_random_state(mine)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether random generators go on alike from two states."""
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else pickle.dumps(a) == pickle.dumps(b)
        for a, b in zip(one.values(), other.values(), strict=True)
    )
