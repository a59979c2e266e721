"""Has a user's forward interpreted where it works on shards while its code speaks of full tensors.

Where a forward says `q.view(B, T, self.n_head, C // self.n_head)`, this rank has some of the heads only. Inside such
modules `hocket.sharding` looks at torch functions, by the same rules by which the model was examined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from hocket.sharding import Interval, Shard, interpreted, leaves, note, noted
from hocket.workload.division import LAYERS

from ...mesh import World
from ._functions import copy_to, gather
from ._numbers import own_numbers


class TensorPeers:
    """The ranks that share a model's layers, see `hocket.sharding.ShardPeers`: between layers nothing is exchanged.

    Args:
        world: the ranks.
    """

    exchanges = False
    passed = LAYERS
    batches = False

    def __init__(self, world: World) -> None:
        self.rank, self.size, self._world = world.rank, world.size, world

    def fetch(self, tensor: torch.Tensor, shard: Shard, wanted: Sequence[Interval], fill: float) -> torch.Tensor:
        """Return the full tensor; shares of it are never wanted."""
        return gather(self._world, tensor, shard)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Never be asked for a sum over ranks."""
        raise AssertionError("row layers add up, and nothing else")

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a replicated tensor for use on shards: its gradients are added over the ranks."""
        return copy_to(self._world, tensor)[0]

    def own_random_numbers(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a block in which random numbers are this rank's own."""
        return own_numbers(self._world, device)

    def batch_norm(self, input: torch.Tensor, divided: bool, weight: Any, bias: Any, eps: float) -> None:
        """Return nothing: channels are whole on a rank."""


class Interpretation:
    """How the forward of one module is interpreted.

    Args:
        world: the ranks that share what is cut.
        given: how arguments are cut, by their places among all.
    """

    def __init__(self, world: World, given: dict[int, Shard]) -> None:
        self._world, self._peers = world, TensorPeers(world)
        self._given = given

    @contextmanager
    def running(self, args: Any, kwargs: Any) -> Iterator[None]:
        """In the block torch functions are looked at; `args` and `kwargs` are what the forward is given."""
        for place, leaf in enumerate(leaves((args, kwargs)) if self._given else ()):
            split = self._given.get(place)
            if split is not None and isinstance(leaf, torch.Tensor) and noted(leaf) is None:
                # The size may be another than the sample's: a sequence's, say.
                alone = len(split.bounds) == 1
                size = leaf.shape[split.dim] * self._world.size
                note(leaf, Shard.even(split.dim, size, self._world.size) if alone else split)
        with interpreted(self._peers):
            yield

    def __deepcopy__(self, memo: dict[int, Any]) -> Interpretation:
        return self


class InterpretedModule(nn.Module):
    """Has the forward of a user's module interpreted; stands before the module's own class."""

    interpretation: Interpretation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        with self.interpretation.running(args, kwargs):
            return super().forward(*args, **kwargs)


def interpret(module: Any, interpretation: Interpretation) -> Callable[[], None]:
    """Has a module's forward interpreted, wherever it is called from; returns what puts it back."""
    old = type(module)
    module.interpretation = interpretation
    replaced = module.__dict__.get("forward")
    if replaced is None:
        # It stays an instance of its class, and whoever copies it copies this too.
        module.__class__ = type(
            old.__name__, (InterpretedModule, old), {"__module__": __name__, "__doc__": old.__doc__}
        )
    else:

        @functools.wraps(replaced)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with interpretation.running(args, kwargs):
                return replaced(*args, **kwargs)

        module.__dict__["forward"] = forward

    def undo() -> None:
        module.__class__ = old
        del module.interpretation
        if replaced is not None:
            module.__dict__["forward"] = replaced

    return undo
