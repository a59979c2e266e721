"""Layers whose weights are cut. An ordinary layer becomes one in place: it stays the object that the user's code holds.

A layer's class becomes a subclass of what it was, and its parameters keep their identity, with this rank's part for
data. What a layer does before and after its own computation is its `LayerPartition`.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hocket._program import program_line
from hocket.sharding import Shard, ShardingError, as_local, gathered, mapped, note, noted
from hocket.workload.division import SEQUENCE

from ...mesh import World
from ._functions import copy_to, gather, gather_partial, reduce_from, reduce_scatter, scatter
from ._numbers import own_numbers
from ._peers import peers_of


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

    def copy(self, world: World, tensor: torch.Tensor, given: Shard | None) -> torch.Tensor:
        """Return the tensor, for use on parts; gathered first, where every rank has a part of it."""
        if tensor.is_inference():  # nothing tells whether it changes in place, and it has no gradient
            return tensor if given is None else gather_partial(world, tensor, given)
        key = (torch.is_grad_enabled(), tensor._version, given)
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
        copy = gather_partial(world, tensor, given) if given is not None else copy_to(world, tensor)[0]
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
    """How a layer is cut."""

    world: World  # the ranks
    # "column" (a part of the outputs), "row" (a part of the inputs), "vocabulary" (a part of an embedding's rows),
    # "heads", "hidden" (a part of a recurrent layer's hidden units), "channels" (a part of both)
    kind: str
    # the dim of the layer's input and output that is cut, from the end where it is negative: -1 for a linear layer
    channel: int
    segments: tuple[int, ...]  # of that dim in the output of a column layer, or in the input of others
    whole: bool  # whether the output of a column layer is gathered
    shared: tuple[Shared, ...]  # for each input, with the layers that get the same (column)
    scatters: bool = False  # whether the output leaves as a part of the sequence, where that can be cut
    outputs: tuple[int, ...] = ()  # sizes of the segments of the output's channels ("channels")
    blocks: list[Any] = field(default_factory=list)  # in which a layer's own code runs now ("channels")

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerPartition:
        return self

    def note(self, y: torch.Tensor, split: Shard | None) -> torch.Tensor:
        """Return a result that says how it is divided."""
        return y if split is None else note(y, split, peers_of(self.world))

    def enter(self, x: torch.Tensor, place: int = 0) -> torch.Tensor:
        """Return what the layer computes on, in the place of its input of that number, however that is divided."""
        given = noted(x)
        if self.kind in ("column", "heads", "vocabulary", "hidden"):
            return self.shared[place].copy(self.world, x, given)
        wanted = _split(x.dim(), self.channel, self.segments, self.world.size)
        if given == wanted:
            return x
        if given is not None:
            x = gather(self.world, x, given)
        if x.shape[wanted.dim] != wanted.size:
            raise ShardingError(
                f"{program_line()}: a layer is given {x.shape[wanted.dim]} features or channels where it has "
                f"{wanted.size}"
            )
        return scatter(self.world, x, wanted)

    def leave(self, y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return what the layer gives, made of its result on this rank."""
        if self.kind == "column":
            split = _split(y.dim(), self.channel, self.segments, self.world.size)
            if not self.whole:
                return self.note(y, split)
            y = gather(self.world, y, split)
            along = self._along(y)
            return y if along is None else self.note(scatter(self.world, y, along), along)
        along = self._along(y)
        if along is not None:
            y = reduce_scatter(self.world, y, along)
            if bias is not None:
                y = y + copy_to(self.world, bias)[0]
            return self.note(y, along)
        y = reduce_from(self.world, y)
        return y if bias is None else y + bias.view(-1, *(1,) * (-1 - self.channel))

    def _along(self, full: torch.Tensor) -> Shard | None:
        """Return how the sequence is divided; None where it stays whole, as one whose length ranks cannot share."""
        length = full.shape[SEQUENCE] if self.scatters else 1
        return None if length % self.world.size else Shard.even(full.dim() + SEQUENCE, length, self.world.size)

    def before_channels(self, _: nn.Module, args: Any) -> Any:
        """Have the code of a layer that works channel by channel mean shards: a hook before its forward."""
        with as_local():
            x = self.enter(args[0])
        self.blocks.append(as_local())
        self.blocks[-1].__enter__()
        return (x, *args[1:])

    def after_channels(self, _: nn.Module, __: Any, y: Any) -> Any:
        """Have the layer's results say what they are: a hook after its forward."""
        self.blocks.pop().__exit__(None, None, None)
        return None if y is None else self.note(y, _split(y.dim(), self.channel, self.outputs, self.world.size))


@functools.lru_cache(maxsize=1024)
def _split(ndim: int, channel: int, segments: tuple[int, ...], ranks: int) -> Shard:
    return Shard.even(channel % ndim, segments, ranks)


class CutLayer(nn.Module):
    """A layer with a form; stands before the layer's own class."""

    form: LayerPartition

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the layer's result, from and to what its form says."""
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
        """Return the layer's own, and its form."""
        return f"{super().extra_repr()}, {self.form.kind} parallel over {self.form.world.size}"


def cut_class(front: type[nn.Module], layer: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a layer that is cut, for which `front` does what a cut layer does besides its own."""
    about = {"__module__": front.__module__, "__doc__": f"{layer.__name__}, cut."}
    return type(f"Cut{layer.__name__}", (front, layer), about)


def _check_ids(ids: torch.Tensor, rows: int) -> None:
    """Raise IndexError for a row that is nobody's, as one device does; on a GPU as late as torch does."""
    if not ids.numel():
        return
    low, high = torch.aminmax(ids)
    if ids.is_cuda:
        torch._assert_async((low >= 0) & (high < rows))
    elif int(low) < 0 or int(high) >= rows:
        wrong = int(low) if int(low) < 0 else int(high)
        raise IndexError(f"row {wrong} of an embedding was looked up, and there are rows 0 to {rows - 1}")


class CutEmbedding(nn.Embedding):
    """An embedding of which every rank has some rows ("vocabulary"), or some columns ("column")."""

    form: LayerPartition

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return full vectors, on every rank."""
        form = self.form
        with as_local():
            ids = form.enter(ids)
            if form.kind == "column":
                return form.leave(super().forward(ids), None)
            rows = self.weight.shape[0]
            _check_ids(ids, rows * form.world.size)
            first = form.world.rank * rows
            elsewhere = (ids < first) | (ids >= first + rows)
            local = (ids - first).masked_fill(elsewhere, 0)
            padding = None
            if self.padding_idx is not None and first <= self.padding_idx < first + rows:
                padding = self.padding_idx - first
            y = F.embedding(local, self.weight, padding).masked_fill(elsewhere.unsqueeze(-1), 0.0)
            return form.leave(y, None)


class CutEmbeddingBag(nn.EmbeddingBag):
    """Bags of an embedding of which every rank has some columns."""

    form: LayerPartition

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return full vectors, on every rank."""
        args, kwargs = mapped(gathered, (args, kwargs))
        with as_local():
            return self.form.leave(super().forward(*args, **kwargs), None)


class CutDropout(nn.Module):
    """Dropout on a part; stands before dropout's own class."""

    form: LayerPartition

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop by numbers of this rank alone, where it is given a part."""
        split = noted(x)
        if split is None or not self.training:
            return super().forward(x)  # type: ignore[no-any-return]
        with as_local(), own_numbers(self.form.world, x.device):
            return self.form.note(super().forward(x), split)


class CutPlainDropout(CutDropout, nn.Dropout):
    """Dropout."""


class CutAlphaDropout(CutDropout, nn.AlphaDropout):
    """AlphaDropout."""


class CutNorm(nn.Module):
    """Normalises parts over dims that are whole: its parameters' gradients are added over the ranks."""

    form: LayerPartition
    normalized_shape: tuple[int, ...]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm, however its input is divided."""
        with as_local():
            split = noted(x)
            if split is not None and split.dim >= x.dim() - len(self.normalized_shape):
                x, split = gather(self.form.world, x, split), None
            if split is None:
                return super().forward(x)  # type: ignore[no-any-return]
            return self.form.note(self._normalised(x), split)

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class CutLayerNorm(CutNorm, nn.LayerNorm):
    """The layer norm."""

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = _copies(self.form.world, self.weight, self.bias)
        return F.layer_norm(x, list(self.normalized_shape), weight, bias, self.eps)


class CutRMSNorm(CutNorm, nn.RMSNorm):
    """The root-mean-square norm."""

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        (weight,) = _copies(self.form.world, self.weight)
        return F.rms_norm(x, list(self.normalized_shape), weight, self.eps)


def _copies(world: World, *parameters: torch.Tensor | None) -> list[torch.Tensor | None]:
    copies = iter(copy_to(world, *(p for p in parameters if p is not None)))
    return [None if p is None else next(copies) for p in parameters]


CUT_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Embedding: CutEmbedding,
    nn.EmbeddingBag: CutEmbeddingBag,
    nn.Dropout: CutPlainDropout,
    nn.AlphaDropout: CutAlphaDropout,
    nn.LayerNorm: CutLayerNorm,
    nn.RMSNorm: CutRMSNorm,
}
for _layer in (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
):  # fmt: skip
    CUT_CLASSES[_layer] = globals()[f"Cut{_layer.__name__}"] = cut_class(CutLayer, _layer)  # where pickle looks
