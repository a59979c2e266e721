"""Cuts the layers of regions in place, and can put everything back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hocket.sharding import Shard, cut, guard_torch
from hocket.workload.division import CHANNEL, CutParameter, RecordedValue, Recording, Region, Role, cut_tensors

from ...mesh import World
from ...state import made_of
from ._attention import CutMultiheadAttention
from ._layers import CUT_CLASSES, LayerPartition, Shared
from ._peers import CutParameters, begin_forward, end_forward
from ._recurrent import RECURRENT_CLASSES


class Applied:
    """Regions, cut in a model, of which the recording tells which layers are given the same input."""

    def __init__(self, model: nn.Module, regions: Iterable[Region], recording: Recording, world: World) -> None:
        self._world = world
        self._undo: list[Callable[[], None]] = []
        self._forms: dict[nn.Module, LayerPartition] = {}
        self.cuts: dict[int, Shard] = {}  # by id of the parameter or buffer
        regions = list(regions)
        sharing = _sharing(regions, recording)
        for region in regions:
            for module, role in region.roles.items():
                self._cut_layer(module, role, sharing.get(module, [Shared(1)] * 3))
        for region in regions:
            for layer in region.scatters:
                self._forms[layer].scatters = True
        for region in regions:
            for name, one in region.tensors.items():
                self._cut_parameter(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], one)
        if regions:
            guard_torch()
            self._hook(model.register_forward_pre_hook(begin_forward, prepend=True))
            self._hook(model.register_forward_hook(end_forward, always_call=True))
        for encoder in model.modules():
            if isinstance(encoder, nn.TransformerEncoder | nn.TransformerEncoderLayer):
                self._without_fast_path(encoder)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()
        self.cuts.clear()

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        if name in module.__dict__:
            old = module.__dict__[name]
            self._undo.append(lambda: setattr(module, name, old))
        else:
            self._undo.append(lambda: delattr(module, name))
        setattr(module, name, value)

    def _become(self, module: nn.Module, kind: type[nn.Module], form: LayerPartition) -> None:
        old = type(module)
        self._undo.append(lambda: setattr(module, "__class__", old))
        self._set(module, "form", form)
        self._forms[module] = form
        module.__class__ = kind

    def _cut(self, tensor: torch.Tensor, split: Shard) -> None:
        if id(tensor) in self.cuts:
            return
        full = tensor.data
        self._undo.append(lambda: give_data(tensor, full))
        self.cuts[id(tensor)] = split
        give_data(tensor, made_of(tensor, lambda data: cut(data, split, self._world.rank).clone()))

    def _cut_parameter(self, owner: nn.Module, name: str, one: CutParameter) -> None:
        self._cut(one.parameter, one.shard)
        if not isinstance(owner._parameters, CutParameters):
            self._set(owner, "_parameters", CutParameters(owner._parameters, self._world))
        seen: Any = owner._parameters
        seen.named[name] = one.shard, "alone" if one.alone else "parts"

    def _hook(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _cut_layer(self, module: Any, role: Role, shared: list[Shared]) -> None:
        world, segments, kind = self._world, role.split.segments, type(module)
        channel = CHANNEL.get(kind, 1 if role.kind == "channels" else -1)
        form = LayerPartition(world, role.kind, channel, segments, role.whole, tuple(shared))
        seen = CutParameters(module._parameters, world)
        for tensor, split in cut_tensors(module, role):
            self._cut(tensor, split)
            seen.shards[id(tensor)] = split
        self._set(module, "_parameters", seen)
        if role.kind == "heads":
            self._set(module, "weights_used", role.whole)
            self._become(module, CutMultiheadAttention, form)
        elif role.kind == "hidden":
            self._become(module, RECURRENT_CLASSES[kind], form)
        elif role.kind == "channels":
            form.outputs = (module.out_channels,) if kind in CHANNEL else segments
            self._narrow_channels(module)
            self._hook(module.register_forward_pre_hook(form.before_channels))
            self._hook(module.register_forward_hook(form.after_channels, always_call=True))
        else:
            self._become(module, CUT_CLASSES[kind], form)

    def _narrow_channels(self, module: Any) -> None:
        for name in ("num_features", "num_groups", "num_channels", "num_parameters", "groups", "in_channels"):
            if hasattr(module, name):
                self._set(module, name, getattr(module, name) // self._world.size)
        if type(module) in CHANNEL:
            self._set(module, "out_channels", module.out_channels // self._world.size)

    def _without_fast_path(self, encoder: Any) -> None:
        """Keep torch's fused inference away: it takes weights out of the layers, which are parts now."""
        if not any(hasattr(module, "form") for module in encoder.modules()):
            return
        if isinstance(encoder, nn.TransformerEncoder):
            self._set(encoder, "use_nested_tensor", False)
        else:
            self._set(encoder, "activation_relu_or_gelu", 0)


def give_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Give a parameter data of another shape or type, although a graph of the model may be alive.

    Autograd keeps the node that accumulates the parameter's gradient, with its shape, as long as a graph has it (a
    cache, or a weight that is made of others, holds one); it makes a new one where the type of the data changes.
    """
    other = torch.float16 if data.dtype != torch.float16 else torch.bfloat16
    tensor.data = torch.empty(0, dtype=other, device=data.device)
    tensor.data = data


def _sharing(regions: list[Region], recording: Recording) -> dict[nn.Module, list[Shared]]:
    """Return what layers that are given the same tensors have in common: for each of their inputs."""
    makers = {m: role for r in regions for m, role in r.roles.items() if role.kind in ("column", "heads", "hidden")}
    inputs: dict[tuple[nn.Module, int], list[RecordedValue]] = {}
    for call in recording.calls:
        if call.module in makers and type(call.module) is not nn.Embedding:
            for place, value in enumerate(call.inputs[: 3 if makers[call.module].kind == "heads" else 1]):
                inputs.setdefault((call.module, place), []).append(value)
    groups: dict[tuple[int, ...], set[nn.Module]] = {}
    for (module, _), values in inputs.items():
        groups.setdefault(tuple(map(id, values)), set()).add(module)
    made = {key: Shared(len(users)) for key, users in groups.items()}
    found: dict[nn.Module, list[Shared]] = {}
    for (module, _), values in inputs.items():
        found.setdefault(module, []).append(made[tuple(map(id, values))])
    return found
