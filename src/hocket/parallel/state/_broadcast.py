"""Broadcasts of parameters, buffers and optimizer state from rank 0, and which parameters they leave out."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hocket import comm
from hocket.comm import torch_adapter
from hocket.sharding import set_values

from ..mesh import World
from ._deferred import is_deferred
from ._parameters import parameters_of

_PIECE_NBYTES = 32 * 2**20
_ALIGNMENT_NBYTES = 16
_ATTRIBUTE = "_hocket_keeper"


class Keeper(Protocol):
    """Who brings the gradients of such parameters to where they belong."""

    def weigh_by(self, weight: Callable[[], float]) -> None:
        """Have this rank's gradients count `weight()` times in the average over ranks, asked in each backward pass."""


def exclude_from_reduction(parameter: torch.nn.Parameter, keeper: Keeper) -> None:
    """Leave a parameter out of broadcasts and averages, because each rank holds another part of it."""
    setattr(parameter, _ATTRIBUTE, keeper)


def is_excluded(parameter: torch.Tensor) -> bool:
    """Return whether ranks hold different parts of the parameter."""
    return hasattr(parameter, _ATTRIBUTE)


def keepers(module: torch.nn.Module) -> Iterator[Keeper]:
    """Return the keepers of a module's excluded parameters, each once."""
    found = [getattr(p, _ATTRIBUTE) for p in parameters_of(module) if is_excluded(p)]
    yield from {id(keeper): keeper for keeper in found}.values()


class FlatBundle:
    """Tensors of any types on one device, alike on all ranks, sent from rank 0 to all as one flat tensor of bytes."""

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
        """Return whether the bundle was made for exactly these tensors."""
        return len(tensors) == len(self._tensors) and all(a is b for a, b in zip(tensors, self._tensors, strict=True))

    def broadcast(self) -> None:
        """Overwrite the tensors with rank 0's values; autograd does not take notice."""
        values = [t.data for t in self._tensors]
        if self._world.rank == 0:
            torch_adapter.foreach_copy(self._views, values)
        dist.broadcast(self._bytes, src=self._world.root, group=self._world.group)
        if self._world.rank != 0:
            torch_adapter.foreach_copy(values, self._views)


class FlatBundles:
    """Broadcasts of tensors of several devices: a `FlatBundle` for each, kept as long as the tensors are the same."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._bundles: list[FlatBundle] = []
        self._sent: list[tuple[weakref.ref[torch.Tensor], int]] = []  # tensors of other layouts, and their versions

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` with rank 0's values; a collective operation."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        others: list[torch.Tensor] = []
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                others.append(tensor)
            elif tensor.numel():
                by_device.setdefault(tensor.device, []).append(tensor)
        for i, same_device in enumerate(by_device.values()):
            if i == len(self._bundles):
                self._bundles.append(FlatBundle(same_device, self._world))
            elif not self._bundles[i].holds(same_device):
                self._bundles[i] = FlatBundle(same_device, self._world)
            self._bundles[i].broadcast()
        if others:
            now = [(weakref.ref(one), torch_adapter.version_of(one)) for one in others]
            changed = len(now) != len(self._sent) or any(
                one is not before() or version != written
                for one, (before, version), (_, written) in zip(others, self._sent, now, strict=True)
            )
            _send_objects(others, self._world, changed=changed)
            self._sent = now


def _send_objects(tensors: Sequence[torch.Tensor], world: World, *, changed: bool = True) -> None:
    """Overwrite tensors of any layout (sparse ones) with rank 0's, if they have `changed` there."""
    values = world.from_root([one.detach() for one in tensors] if changed else None)
    if world.rank != 0 and values is not None:
        for mine, value in zip(tensors, values, strict=True):
            set_values(mine, value)


def broadcast_tensors(tensors: Sequence[torch.Tensor], world: World) -> None:
    """Overwrite `tensors` with rank 0's values, in pieces that need little memory; not those that have none yet."""
    piece: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if is_deferred(tensor):
            continue
        if tensor.layout is not torch.strided:
            others.append(tensor)
            continue
        size = tensor.numel() * tensor.element_size()
        if piece and (nbytes + size > _PIECE_NBYTES or tensor.device != piece[0].device):
            FlatBundle(piece, world).broadcast()
            piece, nbytes = [], 0
        piece.append(tensor)
        nbytes += size
    if piece:
        FlatBundle(piece, world).broadcast()
    if others:
        _send_objects(others, world)


def check_model(module: torch.nn.Module, world: World) -> None:
    """Raise ValueError on every rank if the ranks' models have not the same parameters and buffers.

    The message names the rank and the first parameter or buffer that differs from rank 0's.
    """
    parameters = list(module.named_parameters())
    for name, parameter in parameters:
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run the model once on a sample first")
    mine = [
        (name, tuple(t.shape), str(t.dtype), kind)
        for kind, named in (("parameter", parameters), ("buffer", module.named_buffers()))
        for name, t in named
        if not is_excluded(t)
    ]
    if len(set(world.from_all(_digest(mine)))) == 1:
        return
    models = world.from_all(mine)
    for rank, model in enumerate(models):
        for i in range(max(len(model), len(models[0]))):
            here, root = (m[i] if i < len(m) else None for m in (model, models[0]))
            if here != root:
                raise ValueError(f"the model on rank {rank} is not that of rank 0: {_say(here)} against {_say(root)}")


def check_replicas(parts: Sequence[tuple[torch.nn.Module, Mapping[str, str]]], replicas: World, whole: World) -> None:
    """Raise RuntimeError on every rank if ranks that hold the same parameters do not hold them in one order.

    Gradients are averaged in this order, and sums over other parameters' would be wrong without a word. `parts` are
    what this rank holds, with the model's own names of its parameters; `replicas` hold the same.
    """
    mine = [
        (names[name], tuple(p.shape), str(p.dtype))
        for module, names in parts
        for name, p in module.named_parameters()
        if not is_excluded(p)
    ]
    digests = replicas.from_all(_digest(mine))
    differ = any(digest != digests[0] for digest in digests)
    if not (differ if replicas.size == whole.size else any(whole.from_all(differ))):
        return
    orders = replicas.from_all(mine)
    found = (
        f"rank {replicas.rank} of {replicas.size} replicas holds {here[0]!r} where the first one holds {first[0]!r}"
        for here, first in zip(mine, orders[0], strict=False)
        if here != first
    )
    raise RuntimeError(
        "replicas hold their parameters in different orders, and would average gradients of different ones: "
        + next(found, "those of another rank")
        + "; this is a defect of Hocket: please report it with the model"
    )


def _digest(value: Any) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


def _say(entry: tuple[str, tuple[int, ...], str, str] | None) -> str:
    if entry is None:
        return "nothing more"
    name, shape, dtype, kind = entry
    return f"{kind} {name!r} of shape {list(shape)} and type {dtype}"


def broadcast_optimizer_state(optimizer: Any, world: World) -> None:
    """Give every rank rank 0's optimizer state and settings, if they are not the same everywhere.

    That is the case where only rank 0 has loaded a checkpoint, say. Tensors are compared by their number and shape, not
    by value; settings such as learning rates by value.
    """
    try:
        state = optimizer.state_dict()
    except AttributeError:  # of a wrapper that has not called its base's constructor, in torch
        inner = torch_adapter.steps_of(optimizer)
        if inner is None or inner is optimizer or optimizer.state:
            raise
        optimizer, state = inner, inner.state_dict()
    if len(set(world.from_all(_digest(_outline(state))))) > 1:
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
