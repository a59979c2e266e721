"""What a step of training is expected to communicate, told from the recording of a sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ._record import CELLS, Call, RecordedValue, Recording
from ._regions import TABLES, Exchanged, Region, Role


@dataclass(frozen=True, slots=True)
class CollectiveCount:
    """The collectives of one kind that a group of ranks carries out in one pass."""

    phase: str  # "forward" or "backward"
    kind: str  # as `hocket.profile` names it: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all"
    count: int  # how many; the same on every rank
    nbytes: int  # bytes of their full tensors together; of an "all_to_all", what all ranks put in

    def __str__(self) -> str:
        return f"{self.phase}: {self.count} {self.kind} of {self.nbytes} bytes in all"


def tally(regions: list[Region], recording: Recording) -> list[CollectiveCount]:
    """Return the operations of a forward and a backward pass on the sample, by phase and kind."""
    found: dict[tuple[str, str], list[int]] = {}
    for one in exchanges(regions, recording):
        found.setdefault((one.phase, one.kind), []).append(one.nbytes)
    order = sorted(found.items(), key=lambda item: (item[0][0] == "backward", item[0][1]))
    return [CollectiveCount(*key, len(sizes), sum(sizes)) for key, sizes in order]


def exchanges(regions: list[Region], recording: Recording) -> list[Exchanged]:
    """Return every operation of a forward and a backward pass on the sample."""
    found: list[Exchanged] = []
    roles: dict[nn.Module | None, Role] = {m: role for region in regions for m, role in region.roles.items()}
    gathers = {(m, place) for region in regions for m, places in region.gathers.items() for place in places}
    scatters = {m for region in regions for m in region.scatters}
    entered: set[RecordedValue] = set()

    def add(phase: str, kind: str, nbytes: int, with_batch: bool = True) -> None:
        found.append(Exchanged(phase, kind, nbytes, call.index, with_batch))

    def enter(place: int) -> None:
        """Note that a tensor is used on parts of a layer: once for all layers that use it."""
        value = call.inputs[place]
        if value in entered:
            return
        entered.add(value)
        if (call.module, place) in gathers:
            add("forward", "all_gather", value.nbytes)
            add("backward", "reduce_scatter", value.nbytes)
        elif value.grad:
            add("backward", "all_reduce", value.nbytes)

    def leave() -> None:
        """Note that parts are added up."""
        out = call.outputs[0]
        if call.module not in scatters:
            add("forward", "all_reduce", out.nbytes)
            return
        add("forward", "reduce_scatter", out.nbytes)
        add("backward", "all_gather", out.nbytes)
        layer: Any = call.module
        bias = layer.out_proj.bias if isinstance(layer, nn.MultiheadAttention) else getattr(layer, "bias", None)
        if bias is not None:
            add("backward", "all_reduce", bias.numel() * bias.element_size(), with_batch=False)

    for call in recording.calls:
        role = roles.get(call.module)
        if role is None:
            continue
        out = call.outputs[0]
        if role.kind == "heads":
            for place in range(3):
                enter(place)
            leave()
            if role.whole and len(call.outputs) > 1:
                weights = call.outputs[1]
                averaged = len(weights.shape) == len(out.shape)
                add("forward", "all_reduce" if averaged else "all_gather", weights.nbytes)
        elif role.kind == "hidden":
            found += _recurrent(call, role, enter)
        elif role.kind == "column":
            if not isinstance(call.module, TABLES):
                enter(0)
            if role.whole:
                add("forward", "all_gather", out.nbytes)
                if call.module in scatters:
                    add("backward", "all_gather", out.nbytes)
        elif role.kind in ("row", "vocabulary"):
            leave()
            if role.whole and call.inputs[0].grad:
                add("backward", "all_gather", call.inputs[0].nbytes)
    for region in regions:
        found += region.extras
    return found


def _recurrent(call: Call, role: Role, enter: Callable[[int], None]) -> list[Exchanged]:
    """Return what a recurrent layer exchanges: hidden units after each step, outputs after each layer."""
    layer: Any = call.module
    out, cell = call.outputs[0], isinstance(layer, CELLS)
    if role.whole:
        tensors = [p.numel() * p.element_size() for p in layer.parameters()]
        return [Exchanged("forward", "all_gather", nbytes, call.index, False) for nbytes in tensors]
    enter(0)
    found: list[Exchanged] = []

    def add(phase: str, kind: str, nbytes: int, times: int = 1) -> None:
        found.extend([Exchanged(phase, kind, nbytes, call.index)] * times)

    lstm = isinstance(layer, nn.LSTM | nn.LSTMCell)
    for value, kinds in zip(call.inputs[1:], ("all_reduce", "all_gather"), strict=False):
        if value.grad:
            add("backward", kinds, value.nbytes)
            if isinstance(layer, nn.GRU | nn.GRUCell):  # whose hidden units go into the next ones, too
                add("backward", "all_gather", value.nbytes)
    if cell:
        add("forward", "all_gather", out.nbytes * (1 + lstm))
        return found
    sides, steps = 1 + layer.bidirectional, out.shape[1 if layer.batch_first and len(out.shape) == 3 else 0]
    step = out.nbytes // (sides * steps)
    for phase, kind in (("forward", "all_gather"), ("backward", "reduce_scatter")):
        add(phase, kind, step, (steps - 1) * sides * layer.num_layers)
    add("forward", "all_gather", out.nbytes, layer.num_layers)
    add("backward", "all_reduce", out.nbytes, layer.num_layers - 1)
    if lstm:
        add("forward", "all_gather", step * sides * layer.num_layers)
    return found
