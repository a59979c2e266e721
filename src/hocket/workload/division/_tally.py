"""What a step of training is expected to communicate, told from the recording of a sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ._record import RecordedValue, Recording
from ._regions import Region, Role


@dataclass(frozen=True, slots=True)
class CollectiveCount:
    """The collectives of one kind that a group of ranks carries out in one pass.

    Attributes:
        phase: "forward" or "backward".
        kind: As `hocket.profile` names it: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
        count: How many; the same on every rank.
        nbytes: Bytes of their full tensors together; of an "all_to_all", what all ranks put in.
    """

    phase: str
    kind: str
    count: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.phase}: {self.count} {self.kind} of {self.nbytes} bytes in all"


class Exchanged(NamedTuple):
    """One operation.

    Attributes:
        phase: "forward" or "backward".
        kind: "all_reduce", "all_gather" or "reduce_scatter".
        nbytes: of its full tensor.
        call: in the recording, which makes it necessary.
        with_batch: whether it grows with the batch; the gradients of parameters do not.
    """

    phase: str
    kind: str
    nbytes: int
    call: int
    with_batch: bool = True


def tally(regions: list[Region], recording: Recording) -> list[CollectiveCount]:
    """The operations of a forward and a backward pass on the sample, by phase and kind."""
    found: dict[tuple[str, str], list[int]] = {}
    for one in exchanges(regions, recording):
        found.setdefault((one.phase, one.kind), []).append(one.nbytes)
    order = sorted(found.items(), key=lambda item: (item[0][0] == "backward", item[0][1]))
    return [CollectiveCount(*key, len(sizes), sum(sizes)) for key, sizes in order]


def exchanges(regions: list[Region], recording: Recording) -> list[Exchanged]:
    """Every operation of a forward and a backward pass on the sample."""
    found: list[Exchanged] = []
    roles: dict[nn.Module | None, Role] = {m: role for region in regions for m, role in region.roles.items()}
    gathers = {(m, place) for region in regions for m, places in region.gathers.items() for place in places}
    scatters = {m for region in regions for m in region.scatters}
    entered: set[RecordedValue] = set()

    def add(phase: str, kind: str, nbytes: int, with_batch: bool = True) -> None:
        found.append(Exchanged(phase, kind, nbytes, call.index, with_batch))

    def enter(place: int) -> None:
        """A tensor is used on parts of a layer: once for all layers that use it."""
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
        """Parts are added up."""
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
        elif role.kind == "column":
            if not isinstance(call.module, nn.Embedding):
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
        found += [Exchanged("backward", "all_reduce", *extra) for extra in region.extras]
    return found
