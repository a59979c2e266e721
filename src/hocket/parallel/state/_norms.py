"""Norms over whole parameters and gradient clipping by the global norm, whatever shards of them ranks hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from ..mesh import World
from ._owned import Owned

_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


class WholeNorms:
    """See `hocket.parallel.state.optim.Totals`.

    `groups` has the number of its parameter group for each parameter that the optimizer updates on any rank; `copies`
    says how many ranks of the world hold the same. Where every rank holds all of the model (`local`), nobody need be
    asked.
    """

    def __init__(
        self, groups: Mapping[str, int], copies: Iterable[tuple[Owned, int]], world: World, *, local: bool
    ) -> None:
        self.names = tuple(groups)
        self.groups = tuple(groups.values())
        numbers = {name: number for number, name in enumerate(groups)}
        self.places: dict[torch.Tensor, tuple[int, float]] = {
            item.leaf: (numbers[item.name], 1.0 if local else 1.0 / count)
            for item, count in copies
            if item.name in numbers
        }
        self._world = world
        self._local = local

    def add_up(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the sums over ranks; a collective operation unless every rank holds everything."""
        if self._local or self._world.size == 1:
            return squares
        total = squares.to(self._world.device)
        dist.all_reduce(total, group=self._world.group)
        return total.cpu()


def clip(owned: Iterable[tuple[Owned, int]], max_norm: float, world: World, *, local: bool) -> float:
    """Scale gradients so that their norm over the whole model is `max_norm` at most, as `clip_grad_norm_` does.

    Returned is the norm (the root of the sum of squares) before. `owned` says how many ranks of the world hold the
    same, so that each element counts once; where this rank holds all of the model (`local`), nobody need be asked.
    """
    found = []
    for item, copies in owned:
        gradient = item.leaf.grad
        if gradient is not None and gradient.is_sparse:
            item.leaf.grad = gradient = gradient.coalesce()  # entries of one row must be added before they are squared
        if gradient is not None:
            found.append((gradient.values() if gradient.is_sparse else gradient, copies))
    squares = 0.0
    if found:
        norms = torch.stack([n.double() for n in torch._foreach_norm([gradient for gradient, _ in found])])
        shares = torch.tensor([1.0 if local else 1.0 / count for _, count in found], dtype=torch.float64)
        squares = float((norms.cpu().square() * shares).sum())
    if not local and world.size > 1:
        total = torch.tensor(squares, dtype=torch.float64, device=world.device)
        dist.all_reduce(total, group=world.group)
        squares = total.item()
    norm = float(squares**0.5)
    factor = max_norm / (norm + _EPSILON)
    if not factor >= 1.0 and found:
        torch._foreach_mul_([gradient for gradient, _ in found], factor)
    return norm
