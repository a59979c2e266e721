"""What stands for a full tensor where a program runs: this rank's shard, which knows how it is divided, or a view.

Torch asks such a tensor how a function is to be called on it, and it asks the engine (`_engine`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hocket._program import program_line

from ._call import ShardPeers
from ._placement import Shard, cut, full_shape
from ._trees import leaves

as_local = torch._C.DisableTorchFunctionSubclass
"""Makes a block in which this thread's torch functions are called as they are: the code means shards."""
engine: list[Callable[[Any, Any, dict[str, Any]], Any]] = []
"""What makes calls on such tensors, as the module that does so has entered it."""


class ShardingError(RuntimeError):
    """The program does with a divided tensor what cannot be made as if with the full one."""


class ShardedTensor(torch.Tensor):
    """This rank's shard, where the program sees the full tensor. Made by `note`."""

    _hocket_shard: Shard
    _hocket_peers: ShardPeers
    _hocket_weight: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with as_local():
            return engine[0](func, args, kwargs or {})


class GatheredView(torch.Tensor):
    """A view of a divided tensor that had to be gathered for it: a copy, where the program sees shared memory.

    What is written to either is carried over: from the tensor before the view is read, from the view at once. It is
    refused for what torch makes a view or a copy of, by how the full tensor lies.
    """

    _hocket_source: GatheredSource

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with as_local():
            return engine[0](func, args, kwargs or {})


@dataclass(slots=True)
class GatheredSource:
    """What gathered views are views of."""

    part: Any  # the divided tensor
    whole: torch.Tensor  # the full one, gathered, whose memory they share
    version: int  # of the divided tensor, which counts what was written to it, when both were alike
    held: Callable[[], Any] | None = None  # for what may be a copy: tells whether others hold the divided tensor

    def refresh(self, name: str = "a layer") -> None:
        """Gather the tensor again if it may have been written to; a collective operation."""
        changed = writes_to(self.part) != self.version
        if self.held is not None and changed:
            raise refusal(name, self.whole, "reads a gathered tensor, a view or a copy of one that was changed since")
        if self.held is None and (changed or self.part.is_inference()):
            with torch.enable_grad():  # whatever the block in which the view is read
                self.whole.copy_(gathered(self.part))
            self.version = writes_to(self.part)

    def write(self) -> None:
        """Write the full tensor to the divided one; gradients of what went into it add up over the ranks' shares."""
        if self.held is None:
            peers, shard = self.part._hocket_peers, self.part._hocket_shard
            self.part.copy_(cut(peers.enter(self.whole), shard, peers.rank))
            self.version = writes_to(self.part)

    def check(self, name: str, several: bool) -> None:
        """Refuse to write to what may be a copy, or a view whose tensor others hold; or to several that may overlap."""
        if several:
            raise refusal(name, self.whole, "writes to several tensors, one of which was gathered")
        if self.held is not None and self.held() is not None:
            raise refusal(name, self.whole, "writes to a gathered tensor, which may be a view of another or a copy")


def note(tensor: torch.Tensor, shard: Shard | None, peers: ShardPeers | None = None, weight: str = "") -> torch.Tensor:
    """Write on a tensor how it is divided among `peers`, None for a replicated one, and what it is as a weight.

    Return the tensor; see `Operand.weight`.
    """
    if shard is not None:
        assert peers is not None
        tensor.__class__ = ShardedTensor
        tensor.__dict__.update(_hocket_shard=shard, _hocket_peers=peers, _hocket_weight=weight)
    elif type(tensor) is ShardedTensor:
        tensor.__class__ = torch.Tensor  # type: ignore[assignment]
        for key in ("_hocket_shard", "_hocket_peers", "_hocket_weight"):
            del tensor.__dict__[key]
    return tensor


def noted(tensor: Any) -> Shard | None:
    """Return how a tensor is divided; None where it is replicated, or no tensor."""
    kind = type(tensor)
    if kind is GatheredView:
        tensor._hocket_source.refresh()
    return tensor.__dict__["_hocket_shard"] if kind is ShardedTensor else None


def gathered(tensor: Any) -> Any:
    """Return the full tensor, on every rank; a collective operation where the tensor is divided."""
    if type(tensor) is GatheredView:
        tensor._hocket_source.refresh()
        with as_local():
            return tensor.as_subclass(torch.Tensor)
    if type(tensor) is not ShardedTensor:
        return tensor
    shard, peers = tensor._hocket_shard, tensor._hocket_peers
    with as_local():
        return peers.fetch(tensor, shard, [(0, shard.size)] * peers.size, 0.0)


def refusal(name: str, tensor: torch.Tensor, why: str) -> ShardingError:
    """Return the error that names the line of the user's program, the tensor, and the remedy."""
    shard = tensor.__dict__.get("_hocket_shard")
    shape = list(full_shape(tensor.shape, shard))
    return ShardingError(
        f"{program_line()}: {name} {why}. The tensor has the shape {shape}"
        + (f", and every rank has a part of its dim {shard.dim}" if shard is not None else "")
        + ". Use clone() of it there, or write the line so that it makes a new tensor"
    )


def mark_views(result: Any, source: GatheredSource) -> None:
    """Have results that share the memory of a gathered tensor say so."""
    memory = memory_of(source.whole)
    for leaf in leaves(result):
        if type(leaf) is torch.Tensor and memory_of(leaf) == memory and leaf is not source.whole:
            leaf.__class__ = GatheredView
            leaf.__dict__["_hocket_source"] = source


def memory_of(tensor: torch.Tensor) -> int:
    """Return where a tensor's memory is; 0 of one that has no single one."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def writes_to(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to; 0 in inference mode, in which torch does not count that."""
    return 0 if tensor.is_inference() else tensor._version
