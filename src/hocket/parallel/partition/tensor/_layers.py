"""Layers whose weights are cut. An ordinary layer becomes one in place: it stays the object that the user's code holds.

A layer's class becomes a subclass of what it was, and its parameters keep their identity, with this rank's part for
data. What a layer does before and after its own computation is its `LayerPartition`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hocket.sharding import Shard, as_local, note, noted
from hocket.workload.division import SEQUENCE

from ...mesh import World
from ._functions import copy_to, gather, gather_partial, reduce_from, reduce_scatter, scatter
from ._numbers import own_numbers


class Shared:
    """Makes the copy of an input once for all layers that are given the same tensor.

    So its gradient is added up over the ranks once.

    Args:
        layers: how many layers use it in one forward pass.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._forget()

    def _forget(self) -> None:
        self._source: Any = None
        self._copy: torch.Tensor | None = None
        self._left = 0

    def copy(self, world: World, tensor: torch.Tensor, sequence: Shard | None) -> torch.Tensor:
        """The tensor, for use on parts; gathered first, where every rank has a part of the sequence."""
        key = (torch.is_grad_enabled(), tensor._version, sequence)
        if (
            self._copy is not None
            and self._source is not None
            and self._source[0]() is tensor
            and self._source[1] == key
        ):
            copy = self._copy
            self._left -= 1
            if self._left == 0:
                self._forget()
            return copy
        copy = gather_partial(world, tensor, sequence) if sequence is not None else copy_to(world, tensor)[0]
        self._forget()
        if self._layers > 1:
            self._source, self._copy, self._left = (weakref.ref(tensor), key), copy, self._layers - 1
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        twin: Shared = memo.setdefault(id(self), Shared(self._layers))
        return twin

    def __getstate__(self) -> Any:
        return {"_layers": self._layers}

    def __setstate__(self, state: Any) -> None:
        self._layers = state["_layers"]
        self._forget()


@dataclass(slots=True)
class LayerPartition:
    """How a layer is cut.

    Attributes:
        world: the ranks.
        kind: "column" (a part of the outputs), "row" (a part of the inputs), "vocabulary" (a part of an embedding's
            rows), "heads".
        channel: the dim of the layer's input and output, from the end, that is cut: -1 for a linear layer.
        segments: of that dim in the output of a column layer, or in the input of a row layer.
        whole: whether the cut side is whole to others: a column layer gathers, a row layer cuts its input.
        shared: for each input, with the layers that get the same (column).
        noted: whether to note the cut on the output, for a forward that is interpreted.
        gathers: places of inputs that come as parts of the sequence.
        scatters: whether the output leaves as a part of the sequence.
    """

    world: World
    kind: str
    channel: int
    segments: tuple[int, ...]
    whole: bool
    shared: tuple[Shared, ...]
    noted: bool = False
    gathers: frozenset[int] = frozenset()
    scatters: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerPartition:
        return self

    def enter(self, x: torch.Tensor, place: int = 0) -> torch.Tensor:
        """What the layer computes on, in the place of its input of that number."""
        if self.kind in ("column", "heads"):
            sequence = None
            if place in self.gathers:
                sequence = Shard.even(x.dim() + SEQUENCE, x.shape[SEQUENCE] * self.world.size, self.world.size)
            return self.shared[place].copy(self.world, x, sequence)
        if self.whole:
            return scatter(self.world, x, Shard.even(x.dim() + self.channel, self.segments, self.world.size))
        return x

    def leave(self, y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """What the layer returns."""
        if self.kind == "column":
            split = Shard.even(y.dim() + self.channel, self.segments, self.world.size)
            if not self.whole:
                return note(y, split) if self.noted else y
            y = gather(self.world, y, split)
            return self._part(y, scatter) if self.scatters else y
        if self.scatters:
            y = self._part(y, reduce_scatter)
            if bias is not None:
                (bias,) = copy_to(self.world, bias)
                return note(y + bias, noted(y))
            return y
        y = reduce_from(self.world, y)
        return y if bias is None else y + bias.view(-1, *(1,) * (-1 - self.channel))

    def _part(
        self, full: torch.Tensor, operation: Callable[[World, torch.Tensor, Shard], torch.Tensor]
    ) -> torch.Tensor:
        """This rank's part of the sequence."""
        length = full.shape[SEQUENCE]
        if length % self.world.size:
            raise ValueError(
                f"a sequence of length {length} cannot be cut into {self.world.size} equal parts; pad it, or plan "
                "without sequence_parallel"
            )
        split = Shard.even(full.dim() + SEQUENCE, length, self.world.size)
        y = operation(self.world, full, split)
        return note(y, split) if self.noted else y


class CutLayer(nn.Module):
    """A layer with a form; stands before the layer's own class."""

    form: LayerPartition

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The layer's result, from and to what its form says."""
        layer: Any = self
        with as_local():
            form, bias = self.form, layer.bias
            x = form.enter(x)
            if form.kind == "column" or bias is None:
                return form.leave(super().forward(x, *args, **kwargs), None)
            layer.bias = None  # it is added once, to the sum
            try:
                y = super().forward(x, *args, **kwargs)
            finally:
                layer.bias = bias
            return form.leave(y, bias)

    def extra_repr(self) -> str:
        """The layer's own, and its form."""
        return f"{super().extra_repr()}, {self.form.kind} parallel over {self.form.world.size}"


def _cut_class(layer: type[nn.Module]) -> type[nn.Module]:
    return type(
        f"Cut{layer.__name__}", (CutLayer, layer), {"__module__": __name__, "__doc__": f"{layer.__name__}, cut."}
    )


CutLinear = _cut_class(nn.Linear)
CutConv1d = _cut_class(nn.Conv1d)
CutConv2d = _cut_class(nn.Conv2d)
CutConv3d = _cut_class(nn.Conv3d)
CutConvTranspose1d = _cut_class(nn.ConvTranspose1d)
CutConvTranspose2d = _cut_class(nn.ConvTranspose2d)
CutConvTranspose3d = _cut_class(nn.ConvTranspose3d)


class CutEmbedding(nn.Embedding):
    """An embedding of which every rank has some rows ("vocabulary"), or some columns ("column")."""

    form: LayerPartition

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Full vectors, on every rank."""
        form = self.form
        if form.kind == "column":
            return form.leave(super().forward(ids), None)
        rows = self.weight.shape[0]
        first = form.world.rank * rows
        elsewhere = (ids < first) | (ids >= first + rows)
        local = (ids - first).masked_fill(elsewhere, 0)
        padding = None
        if self.padding_idx is not None and first <= self.padding_idx < first + rows:
            padding = self.padding_idx - first
        y = F.embedding(local, self.weight, padding).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return form.leave(y, None)


class CutDropout(nn.Module):
    """Dropout on a part; stands before dropout's own class."""

    form: LayerPartition

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drops by numbers of this rank alone."""
        if not self.training:
            return x
        with own_numbers(self.form.world, x.device):
            y: torch.Tensor = super().forward(x)
        return y


class CutPlainDropout(CutDropout, nn.Dropout):
    """Dropout."""


class CutAlphaDropout(CutDropout, nn.AlphaDropout):
    """AlphaDropout."""


class CutLayerNorm(nn.LayerNorm):
    """Normalises parts over dims that are whole: its parameters' gradients are added over the ranks."""

    form: LayerPartition

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer norm."""
        weight, bias = _copies(self.form.world, self.weight, self.bias)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class CutRMSNorm(nn.RMSNorm):
    """The same for RMSNorm."""

    form: LayerPartition

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The root-mean-square norm."""
        (weight,) = _copies(self.form.world, self.weight)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def _copies(world: World, *parameters: torch.Tensor | None) -> list[torch.Tensor | None]:
    copies = iter(copy_to(world, *(p for p in parameters if p is not None)))
    return [None if p is None else next(copies) for p in parameters]


CUT_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: CutLinear,
    nn.Conv1d: CutConv1d,
    nn.Conv2d: CutConv2d,
    nn.Conv3d: CutConv3d,
    nn.ConvTranspose1d: CutConvTranspose1d,
    nn.ConvTranspose2d: CutConvTranspose2d,
    nn.ConvTranspose3d: CutConvTranspose3d,
    nn.Embedding: CutEmbedding,
    nn.Dropout: CutPlainDropout,
    nn.AlphaDropout: CutAlphaDropout,
    nn.LayerNorm: CutLayerNorm,
    nn.RMSNorm: CutRMSNorm,
}
