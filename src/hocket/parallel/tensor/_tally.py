"""What a step of training is expected to communicate, told from the recording of a sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ._record import Call, Recording, Value
from ._regions import Region, Role


@dataclass(frozen=True, slots=True)
class Collective:
    """Operations of one kind in one pass.

    Attributes:
        phase: "forward" or "backward".
        kind: "all_reduce", "all_gather" or "reduce_scatter".
        count: how many.
        nbytes: bytes of their full tensors together.
    """

    phase: str
    kind: str
    count: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.phase}: {self.count} {self.kind} of {self.nbytes} bytes in all"


def tally(regions: list[Region], recording: Recording) -> list[Collective]:
    """The operations of a forward and a backward pass on the sample."""
    found: dict[tuple[str, str], list[int]] = {}
    roles: dict[nn.Module | None, Role] = {m: role for region in regions for m, role in region.roles.items()}
    entered: set[Value] = set()

    def add(phase: str, kind: str, nbytes: int) -> None:
        found.setdefault((phase, kind), []).append(nbytes)

    def enter(value: Value) -> None:
        """A whole tensor is used on parts: once for all layers that use it."""
        if value.grad and value not in entered:
            add("backward", "all_reduce", value.nbytes)
        entered.add(value)

    for call in recording.calls:
        role = roles.get(call.module)
        if role is not None:
            _add_layer(call, role, add, enter)
    for region in regions:
        for nbytes in region.extra_nbytes:
            add("backward", "all_reduce", nbytes)
    return [
        Collective(*key, len(sizes), sum(sizes))
        for key, sizes in sorted(found.items(), key=lambda item: (item[0][0] == "backward", item[0][1]))
    ]


def _add_layer(call: Call, role: Role, add: Callable[[str, str, int], None], enter: Callable[[Value], None]) -> None:
    out = call.outputs[0]
    if role.kind == "heads":
        for value in dict.fromkeys(call.inputs[:3]):
            enter(value)
        add("forward", "all_reduce", out.nbytes)
        if role.whole and len(call.outputs) > 1:
            weights = call.outputs[1]
            averaged = len(weights.shape) == len(out.shape)
            add("forward", "all_reduce" if averaged else "all_gather", weights.nbytes)
    elif role.kind == "column":
        if not isinstance(call.module, nn.Embedding):
            enter(call.inputs[0])
        if role.whole:
            add("forward", "all_gather", out.nbytes)
    elif role.kind in ("row", "vocabulary"):
        add("forward", "all_reduce", out.nbytes)
        if role.whole and call.inputs[0].grad:
            add("backward", "all_gather", call.inputs[0].nbytes)
