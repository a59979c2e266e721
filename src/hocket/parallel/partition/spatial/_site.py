"""What a rule is given: one call of a torch function with divided tensors, and what it may do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...mesh import World
from . import _exchange
from ._slabs import Interval, Slabs

_NOTE = "_hocket_slabs"


class CannotDivide(Exception):
    """A call cannot be made on slabs: the tensors are gathered for it. The message says why."""


class Groups(NamedTuple):
    """The ranks that a divided model works with.

    Attributes:
        spatial: who share each sample.
        statistics: who share batch norm's statistics of divided tensors: `spatial`, and perhaps other samples' ranks.
        samples: who share those of whole tensors: ranks of other samples, with the same place in `spatial`.
    """

    spatial: World
    statistics: World
    samples: World


def note(tensor: Any, slabs: Slabs | None) -> Any:
    """Marks a tensor as this rank's slab; None as whole."""
    if slabs is not None:
        setattr(tensor, _NOTE, slabs)
    elif hasattr(tensor, _NOTE):
        delattr(tensor, _NOTE)
    return tensor


def noted(tensor: Any) -> Slabs | None:
    """How a tensor is divided; None where it is whole, or no tensor."""
    found: Slabs | None = tensor.__dict__.get(_NOTE) if isinstance(tensor, torch.Tensor) else None
    return found


def full_shape(tensor: torch.Tensor) -> torch.Size:
    """The shape of the tensor that `tensor` is a slab of."""
    slabs, shape = noted(tensor), list(tensor.shape)
    if slabs is not None:
        shape[slabs.dim] = slabs.size
    return torch.Size(shape)


class Site:
    """One call.

    Attributes:
        func: what was called.
        name: its name, as `function_name` gives it.
        groups: the ranks.
        say: told what became of the call, and why, where a rule knows better than its caller.
        in_place: whether it changes its first argument.
    """

    def __init__(self, func: Any, name: str, groups: Groups, say: Callable[[str, str], None]) -> None:
        self.func = func
        self.name = name
        self.groups = groups
        self.say = say
        self.in_place = False

    @property
    def world(self) -> World:
        """The ranks that share each sample."""
        return self.groups.spatial

    def slabs(self, tensor: Any, dims: int = 0) -> Slabs:
        """How the tensor that the function is about is divided.

        Args:
            tensor: the tensor.
            dims: how many of its last dims may be divided; 0 for any.

        Raises:
            CannotDivide: it is whole, or divided in another dim.
        """
        found = noted(tensor)
        if found is None:
            raise CannotDivide("a slab in another place than its first argument")
        if dims and found.dim < -dims:
            raise CannotDivide("divided in a dim that is not spatial")
        return found

    def fetch(self, tensor: torch.Tensor, wanted: Sequence[Interval], fill: float = 0.0) -> torch.Tensor:
        """This rank's wanted rows of a divided tensor."""
        return _exchange.fetch(self.world, tensor, self.slabs(tensor), wanted, fill)

    def moved(self, tensor: torch.Tensor, slabs: Slabs) -> torch.Tensor:
        """This rank's slab of a tensor, as `slabs` divides it, from a tensor that is whole or divided in any way."""
        now = noted(tensor)
        if now is None:
            begin, end = slabs.interval(self.world.rank)
            return tensor.narrow(slabs.dim, begin, end - begin)
        if now.dim != slabs.dim or now.size != slabs.size:
            raise CannotDivide(f"slabs of {now.size} in dim {now.dim} meet slabs of {slabs.size} in dim {slabs.dim}")
        return self.fetch(tensor, slabs.intervals())

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The full tensor."""
        slabs = noted(tensor)
        return tensor if slabs is None else _exchange.gather(self.world, tensor, slabs)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        return _exchange.total(self.world, tensor)

    def mine(self, slabs: Slabs) -> int:
        """How much this rank has."""
        return slabs.length(self.world.rank)


def join_rows(dim: int, *parts: torch.Tensor) -> torch.Tensor:
    """The parts one after the other."""
    return torch.cat(parts, dim)


def rows_like(tensor: torch.Tensor, dim: int, count: int, fill: float = 0.0) -> torch.Tensor:
    """New rows that go with a tensor."""
    shape = list(tensor.shape)
    shape[dim] = count
    return tensor.new_full(shape, fill)


def each(value: Any, n: int) -> tuple[int, ...]:
    """One number for each of n dims."""
    if isinstance(value, int):
        return (value,) * n
    return tuple(value) * n if len(value) == 1 else tuple(value)
