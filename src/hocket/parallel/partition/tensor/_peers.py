"""The ranks of tensor parallelism as divided tensors see them, and the block in which parameters tell what they are."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from hocket.sharding import Interval, Shard, as_local, gathered, note

from ...batches import mapped
from ...mesh import World
from ._functions import copy_to, gather, reduce_from
from ._numbers import own_numbers


class TensorPeers:
    """The ranks that share a model's layers, see `hocket.sharding.ShardPeers`: between layers nothing is exchanged."""

    exchanges = False
    gathers = True

    def __init__(self, world: World) -> None:
        self.heard: Callable[[str, Any, str, str], None] | None = None
        self.rank, self.size, self._world = world.rank, world.size, world

    def fetch(self, tensor: torch.Tensor, shard: Shard, wanted: Sequence[Interval], fill: float) -> torch.Tensor:
        """Return the full tensor; shares of it are never wanted."""
        return gather(self._world, tensor, shard)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, for use that is the same on all of them."""
        return reduce_from(self._world, tensor)

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a replicated tensor for use on shards: its gradients are added over the ranks."""
        return copy_to(self._world, tensor)[0]

    def own_random_numbers(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a block in which random numbers are this rank's own."""
        return own_numbers(self._world, device)

    def batch_norm(self, input: torch.Tensor, divided: bool, weight: Any, bias: Any, eps: float) -> None:
        """Return nothing: channels are whole on a rank."""


peers_of = functools.lru_cache(maxsize=8)(TensorPeers)
"""The peers of a world: one object for all its layers, by which calls are known again."""


class _Local(threading.local):
    """The models whose forward runs on this thread, by their ids, and 0 for a part of one."""

    def __init__(self) -> None:
        self.running: list[int] = []


_local = _Local()


def begin_forward(model: nn.Module, *_: Any) -> None:
    """Note that code of the user's runs now: a hook of the whole model before its forward."""
    _local.running.append(id(model))


def end_forward(model: nn.Module, _: Any, output: Any) -> Any:
    """Return what the whole model gives as a whole: a hook after its forward, which may have failed before it began."""
    running = _local.running
    if id(model) in running:
        while running.pop() != id(model):
            pass
    return mapped(output, gathered)


@contextmanager
def reading_cut_parameters() -> Iterator[None]:
    """Open a block in which code of the user's runs, a stage of a pipeline say: it is given divided tensors."""
    _local.running.append(0)
    try:
        yield
    finally:
        _local.running.pop()


class CutParameters(dict[str, Any]):
    """The parameters of a layer; code of the user's that reads one in a forward is given a divided tensor.

    So that `self.head.weight.norm()` is the full matrix's. Layers, optimizers and hooks get the parameters themselves.
    """

    def __init__(self, plain: dict[str, Any], world: World) -> None:
        super().__init__(plain)
        self.world = world
        self.shards: dict[int, Shard] = {}  # how a layer's own are divided, by their ids
        # how those are divided that functions use as they are, by name, and as what (`Operand.weight`)
        self.named: dict[str, tuple[Shard, str]] = {}

    def __getitem__(self, name: str) -> Any:
        return self._seen(name, super().__getitem__(name))

    def items(self) -> Any:
        """Return pairs of names and parameters."""
        return [(name, self._seen(name, value)) for name, value in super().items()] if _reading() else super().items()

    def values(self) -> Any:
        """Return the parameters."""
        return [self._seen(name, value) for name, value in super().items()] if _reading() else super().values()

    def like(self, plain: dict[str, Any]) -> CutParameters:
        """Return parameters that are divided as those of the same names are here."""
        found = CutParameters(plain, self.world)
        found.shards, found.named = self.shards, self.named
        return found

    def _seen(self, name: str, value: Any) -> Any:
        shard, weight = self.named.get(name) or (self.shards.get(id(value)), "")
        if value is None or shard is None or not _reading():
            return value
        with as_local():
            return note(value.view_as(value), shard, peers_of(self.world), weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        plain = {name: copy.deepcopy(value, memo) for name, value in super().items()}
        if not self.named:
            return plain
        twin = CutParameters(plain, self.world)
        twin.named = dict(self.named)
        return twin

    def __reduce__(self) -> Any:
        return dict, (dict(super().items()),)


def _reading() -> bool:
    return bool(_local.running) and torch._C._is_torch_function_enabled()
