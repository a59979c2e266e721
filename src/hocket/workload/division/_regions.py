"""Regions, the layers that are cut together or not at all: what each layer is in one, and what is exchanged for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from hocket.sharding import Shard

from ._record import RecordedValue

CHANNEL: dict[type[nn.Module], int] = {
    nn.Linear: -1,
    nn.Conv1d: -2,
    nn.Conv2d: -3,
    nn.Conv3d: -4,
    nn.ConvTranspose1d: -2,
    nn.ConvTranspose2d: -3,
    nn.ConvTranspose3d: -4,
}
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
TABLES = (nn.Embedding, nn.EmbeddingBag)
LAYERS = frozenset(
    ["linear", "batch_norm", "group_norm", "layer_norm", "rms_norm", "prelu", "embedding"]
    + [f"conv{transposed}{n}d" for transposed in ("", "_transpose") for n in (1, 2, 3)]
)
"""What layers with weights call for themselves: there the weights are shards already."""
PRODUCTS = frozenset(
    [
        "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "grouped_mm", "embedding", "conv1d", "conv2d",
        "conv3d",
    ]
)  # fmt: skip
"""Operators of which a weight may be divided by itself."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a layer is in a region."""

    # "column", "row", "hidden" (a part of a recurrent layer's hidden units), "channels" (a layer that works channel by
    # channel, with parts of its parameters), "summed" (parameters whole, gradients added up), "dropout", "vocabulary",
    # "heads"
    kind: str
    split: Shard  # of its output (column), of its input (others); along the features or channels
    whole: bool = False  # whether the cut side is whole to others


@dataclass(frozen=True, slots=True)
class CutParameter:
    """A parameter that functions use as it is, outside of any layer that is known."""

    parameter: nn.Parameter  # the whole one
    shard: Shard  # how it is divided
    alone: bool = False  # whether the first results that other tensors went into are gathered, or stay divided


class Exchanged(NamedTuple):
    """One operation."""

    phase: str  # "forward" or "backward"
    kind: str  # "all_reduce", "all_gather" or "reduce_scatter"
    nbytes: int  # of its full tensor
    call: int  # in the recording, which makes it necessary
    with_batch: bool = True  # whether it grows with the batch; the gradients of parameters do not


@dataclass(slots=True)
class Region:
    """Layers that are cut together or not at all."""

    roles: dict[nn.Module, Role]  # by layer
    # of the layers, in the order of their first call, and of these parameters
    names: list[str] = field(default_factory=list)
    # operations beside those of the layers: for gradients of tensors between them, for sums and results of parameters
    # that are cut by themselves
    extras: list[Exchanged] = field(default_factory=list)
    reason: str = ""  # why the region is cut as it is
    calls: list[int] = field(default_factory=list)  # places in the recording of what happens on parts
    parts: set[RecordedValue] = field(default_factory=set)  # the values of which every rank has a part
    # layers of other regions whose inputs in those places are parts of the sequence
    gathers: dict[nn.Module, frozenset[int]] = field(default_factory=dict)
    # layers of other regions whose outputs are to be parts of the sequence
    scatters: frozenset[nn.Module] = frozenset()
    # parameters that are cut beside those of layers, by name
    tensors: dict[str, CutParameter] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """How many parameters its layers have."""
        layers = sum(p.numel() for module in self.roles for p in module.parameters())
        return layers + sum(one.parameter.numel() for one in self.tensors.values())

    @property
    def weights(self) -> int:
        """How many matrices make parts or use them up."""
        layers = sum(role.kind in ("column", "row") for role in self.roles.values())
        return layers + sum(one.parameter.ndim > 1 for one in self.tensors.values())

    @property
    def members(self) -> list[nn.Module | nn.Parameter]:
        """Layers and parameters that no other region can have."""
        return [*self.roles, *(one.parameter for one in self.tensors.values())]


def outputs_of(module: nn.Module) -> int:
    """Return the number of output features or channels of a linear layer or a convolution."""
    layer: Any = module
    return int(layer.out_features if type(module) is nn.Linear else layer.out_channels)


def inputs_of(module: nn.Module) -> int:
    """Return the number of its input features or channels."""
    layer: Any = module
    return int(layer.in_features if type(module) is nn.Linear else layer.in_channels)
