"""Makes ranks alike: parameters, buffers and optimizer state as rank 0 has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hocket import comm
from hocket.comm import torch_adapter

from ..mesh import World
from ._excluded import is_apart

_PIECE_NBYTES = 32 * 2**20
_ALIGNMENT_NBYTES = 16


class Parcel:
    """Tensors of any types on one device, sent from rank 0 to all as one stretch of bytes.

    Args:
        tensors: the tensors, of the same shapes and types on every rank.
        world: the ranks.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], world: World) -> None:
        self._tensors = list(tensors)
        self._world = world
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            nbytes = tensor.numel() * tensor.element_size()
            end += -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        device = tensors[0].device
        if device.type == "cpu":
            self._bytes = comm.empty(end, dtype=torch.uint8)
        else:
            self._bytes = torch.empty(end, dtype=torch.uint8, device=device)
        self._views = [
            self._bytes[at : at + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for at, t in zip(offsets, tensors, strict=True)
        ]

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it was made for exactly these tensors."""
        return len(tensors) == len(self._tensors) and all(a is b for a, b in zip(tensors, self._tensors, strict=True))

    def send(self) -> None:
        """Overwrites the tensors with rank 0's values; autograd does not take notice."""
        values = [t.data for t in self._tensors]
        if self._world.rank == 0:
            torch_adapter.foreach_copy(self._views, values)
        dist.broadcast(self._bytes, src=self._world.root, group=self._world.group)
        if self._world.rank != 0:
            torch_adapter.foreach_copy(values, self._views)


class Parcels:
    """Sends tensors of several devices, a `Parcel` for each, which lasts as long as the tensors are the same.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._parcels: list[Parcel] = []

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrites `tensors` with rank 0's values; a collective operation."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                by_device.setdefault(tensor.device, []).append(tensor)
        for i, same_device in enumerate(by_device.values()):
            if i == len(self._parcels):
                self._parcels.append(Parcel(same_device, self._world))
            elif not self._parcels[i].holds(same_device):
                self._parcels[i] = Parcel(same_device, self._world)
            self._parcels[i].send()


def send_once(tensors: Sequence[torch.Tensor], world: World) -> None:
    """Overwrites `tensors` with rank 0's values, in pieces that need little memory."""
    piece: list[torch.Tensor] = []
    nbytes = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if piece and (nbytes + size > _PIECE_NBYTES or tensor.device != piece[0].device):
            Parcel(piece, world).send()
            piece, nbytes = [], 0
        piece.append(tensor)
        nbytes += size
    if piece:
        Parcel(piece, world).send()


def check_model(module: torch.nn.Module, world: World) -> None:
    """Raises ValueError on every rank if the ranks' models have not the same parameters and buffers.

    The message names the rank and the first parameter or buffer that differs from rank 0's.
    """
    for name, parameter in module.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} has no shape yet: run the model once on a sample before hocket.distribute"
            )
    mine = [
        (name, tuple(t.shape), str(t.dtype), kind)
        for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
        for name, t in named
        if not is_apart(t)
    ]
    models = world.from_all(mine)
    for rank, model in enumerate(models):
        for i in range(max(len(model), len(models[0]))):
            here, root = (m[i] if i < len(m) else None for m in (model, models[0]))
            if here != root:
                raise ValueError(f"the model on rank {rank} is not that of rank 0: {_say(here)} against {_say(root)}")


def _say(entry: tuple[str, tuple[int, ...], str, str] | None) -> str:
    if entry is None:
        return "nothing more"
    name, shape, dtype, kind = entry
    return f"{kind} {name!r} of shape {list(shape)} and type {dtype}"


def align_optimizer(optimizer: Any, world: World) -> None:
    """Gives every rank rank 0's optimizer state and settings, if they are not the same everywhere.

    That is the case where only rank 0 has loaded a checkpoint, say. Tensors are compared by their number and shape, not
    by value; settings such as learning rates by value.
    """
    state = optimizer.state_dict()
    sketch = repr(_outline(state))
    if len(set(world.from_all(sketch))) > 1:
        state = world.from_root(state)
        if world.rank != 0:
            optimizer.load_state_dict(state)


def _outline(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return [(str(key), _outline(value[key])) for key in sorted(value, key=str)]
    if isinstance(value, tuple | list):
        return [_outline(item) for item in value]
    return value if isinstance(value, str | int | float | None) else type(value).__name__
