"""Recurrent layers with a part of the hidden units on every rank: LSTM, GRU, RNN, and their cells.

The input projection of all steps is one column-parallel product. In each step every rank computes the gates of its
hidden units, from all hidden units of the step before: an all_gather forward, a reduce_scatter backward. Where a
sequence is packed, weights are gathered instead, and every rank computes all of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hocket.sharding import Shard, as_local, gathered, mapped

from ._functions import copy_to, gather, gather_partial, scatter
from ._layers import LayerPartition, cut_class

Weights = list[Any]
"""Of one layer and direction: of inputs, of hidden units, and a bias of each (or None)."""


def _step(kind: str, x: torch.Tensor, hidden: torch.Tensor, h: Any, c: Any, weights: Weights) -> Any:
    """Return the next hidden units and cells of this rank.

    `x` is what the input adds to the gates, `hidden` all hidden units; `h`, `c` (cells) and `weights` are this rank's.
    """
    gates = F.linear(hidden, weights[1], weights[3])
    if kind == "LSTM":
        i, f, g, o = (x + gates).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if kind == "GRU":
        (r, z, n), (hidden_r, hidden_z, hidden_n) = x.chunk(3, -1), gates.chunk(3, -1)
        n = (n + (r + hidden_r).sigmoid() * hidden_n).tanh()
        return (h - n) * (z + hidden_z).sigmoid() + n, None
    return (x + gates).relu() if kind == "RNN_RELU" else (x + gates).tanh(), None


class CutRecurrent(nn.RNNBase):
    """A recurrent layer; stands before the layer's own class."""

    form: LayerPartition

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Do as the layer's own forward does: return outputs, and the states after the last step."""
        hx, packed = mapped(gathered, hx), isinstance(input, tuple)
        input = mapped(gathered, input) if packed or self.form.whole else input
        with as_local():
            return self._gathered(input, hx) if self.form.whole or packed else self._all(input, hx)

    def _split(self, tensor: torch.Tensor, times: int = 1) -> Shard:
        return Shard.even(tensor.dim() - 1, (self.hidden_size,) * times, self.form.world.size)

    def _gathered(self, input: Any, hx: Any) -> Any:
        own: Any = self
        own._update_flat_weights()  # or torch's forward does so, where FSDP2 has put others in their places
        mine: list[Any] = self._flat_weights
        size = self.hidden_size
        own._flat_weights = [
            gather(self.form.world, one, Shard.even(0, (size,) * (one.shape[0] * self.form.world.size // size),
                                                    self.form.world.size))
            for one in mine
        ]  # fmt: skip
        try:
            return super().forward(input, hx)
        finally:
            own._flat_weights = mine

    def _all(self, input: torch.Tensor, hx: Any) -> Any:
        world, directions, batched = self.form.world, 1 + self.bidirectional, input.dim() == 3
        x = self.form.enter(input)
        x = x.unsqueeze(1) if not batched else x.transpose(0, 1) if self.batch_first else x
        states: Any = hx if isinstance(hx, tuple) else (hx, None)
        zeros = x.new_zeros(self.num_layers * directions, x.shape[1], self.hidden_size)
        h, c = (zeros if one is None else one if batched else one.unsqueeze(1) for one in states)
        (hidden,) = copy_to(world, h)
        h, c = (scatter(world, one, self._split(one)) for one in (h, c))
        each = len(self._flat_weights) // (self.num_layers * directions)
        last: list[torch.Tensor] = []
        cells: list[torch.Tensor] = []
        for layer in range(self.num_layers):
            made = []
            for at in range(layer * directions, (layer + 1) * directions):
                weights = [*self._flat_weights[at * each : (at + 1) * each], None, None]
                parts, cell = self._run(x, hidden[at], h[at], c[at], weights, at % directions == 1)
                made.append(parts)
                cells.append(cell)
            parts = torch.cat(made, -1)
            out = gather(world, parts, self._split(parts, directions))
            last += [side[0 if i else -1] for i, side in enumerate(out.chunk(directions, -1))]
            if layer < self.num_layers - 1:
                (x,) = copy_to(world, F.dropout(out, self.dropout, self.training))
        out = out.squeeze(1) if not batched else out.transpose(0, 1) if self.batch_first else out
        final = torch.stack(last)
        if self.mode != "LSTM":
            return out, final if batched else final.squeeze(1)
        cell = torch.stack(cells)
        cell = gather(world, cell, self._split(cell))
        return out, (final, cell) if batched else (final.squeeze(1), cell.squeeze(1))

    def _run(self, x: Any, hidden: Any, h: Any, c: Any, weights: Weights, reverse: bool) -> Any:
        """Run one layer in one direction: this rank's hidden units after each step, and its cells after the last."""
        gates = F.linear(x, weights[0], weights[2])
        found: list[Any] = [None] * len(gates)
        order = range(len(gates))[:: -1 if reverse else 1]
        for t in order:
            if t != order[0]:
                hidden = gather_partial(self.form.world, h.contiguous(), self._split(h))
            h, c = _step(self.mode, gates[t], hidden, h, c, weights)
            found[t] = h
        return torch.stack(found), c

    def extra_repr(self) -> str:
        """Return the layer's own, and how it is cut."""
        return f"{super().extra_repr()}, hidden units parallel over {self.form.world.size}"


class CutCell(nn.RNNCellBase):
    """A recurrent cell; stands before the cell's own class."""

    form: LayerPartition

    def forward(self, input: torch.Tensor, hx: Any = None) -> Any:
        """Do as the cell's own forward does: return the next hidden units, of an LSTM with the next cells."""
        hx = mapped(gathered, hx)
        with as_local():
            own: Any = self
            world = self.form.world
            kind = "LSTM" if isinstance(self, nn.LSTMCell) else "GRU" if isinstance(self, nn.GRUCell) else (
                f"RNN_{own.nonlinearity.upper()}")  # fmt: skip
            x = self.form.enter(input)
            h, c = hx if isinstance(hx, tuple | list) else (hx, None)
            zeros = x.new_zeros(*x.shape[:-1], self.hidden_size)
            h, c = (zeros if one is None else one for one in (h, c))
            (hidden,) = copy_to(world, h)
            split = Shard.even(h.dim() - 1, self.hidden_size, world.size)
            weights = [self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh]
            h, c = (scatter(world, one, split) for one in (h, c))
            h, c = _step(kind, F.linear(x, weights[0], weights[2]), hidden, h, c, weights)
            if kind != "LSTM":
                return gather(world, h, split)
            both = torch.stack([h, c])
            both = gather(world, both, split.at(split.dim + 1))
            return both[0], both[1]

    def extra_repr(self) -> str:
        """Return the cell's own, and how it is cut."""
        return f"{super().extra_repr()}, hidden units parallel over {self.form.world.size}"


RECURRENT_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    **{one: cut_class(CutRecurrent, one) for one in (nn.LSTM, nn.GRU, nn.RNN)},
    **{one: cut_class(CutCell, one) for one in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)},
}
