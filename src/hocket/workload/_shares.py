"""What one rank does of each unit of a module, if so many divide its tensors as the Trainer does.

FLOPs and bytes of calls on parts are divided evenly; what autograd keeps is divided where every rank keeps its part.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hocket.sharding import strided_parts

from ._kernels import is_made_of_others
from ._share import DividedShare, Exchange, Operation, Part, Share
from ._trace import KernelKey, Spent, Tally, Trace
from .division import Call, Region, Role, choose, cut_tensors, exchanges, sequences

# Layers with these roles compute on parts of their weights.
_COMPUTING = ("column", "row", "heads", "channels", "hidden")


@dataclass(frozen=True)
class Holding:
    """The parameters of a unit that no unit before it has, and the bytes of state that an optimizer keeps of each."""

    parameters: list[nn.Parameter]
    state_bytes: Callable[[nn.Parameter], int]

    def nbytes(self, cut: frozenset[int] = frozenset(), degree: int = 1) -> tuple[int, int, int]:
        """Parameters, gradients, optimizer state of one rank; of those in `cut` each of `degree` ranks has a part."""
        parameters = gradients = state = 0
        for one in self.parameters:
            parts = degree if id(one) in cut else 1
            count = one.numel() // parts
            parameters += count * _held_bytes(one) // max(1, one.numel())
            if one.requires_grad:
                gradients += count * one.element_size()
                state += self.state_bytes(one) // parts
        return parameters, gradients, state


def _held_bytes(parameter: nn.Parameter) -> int:
    """Return what a parameter takes; one of 8 or 4 bits passes for the type in which it computes."""
    whole = parameter.numel() * parameter.element_size()
    if not is_made_of_others(parameter):
        return whole
    return min(whole, sum(one.numel() * one.element_size() for one in strided_parts(parameter)))


def shares_of(
    model: nn.Module, trace: Trace, held: Mapping[int, Holding], degrees: Sequence[int], *,
    known: bool, in_steps: Callable[[], Trace] | None = None,
) -> dict[int, tuple[Share, ...]]:  # fmt: skip
    """By unit, one rank's share for each number of ranks; units that stay whole are left out.

    `known` says whether kernels are told apart; `in_steps` makes another trace, in which recurrent layers do one step
    after the other with operators of their own: so they run where ranks have parts of their hidden units.
    """
    found: dict[int, tuple[Share, ...]] = {}
    if not trace.recording.complete:  # the loss went around the model's forward, by which the Trainer would divide it
        return found
    stepwise: Trace | None = None
    for degree in sorted(set(degrees) - {1}):
        regions = choose(model, trace.recording, degree).regions
        seen = trace
        apart = _calls_in_steps(trace, regions)
        if apart and in_steps:
            stepwise = stepwise or in_steps()
            kernels = {place: stepwise.kernels[place] for place in trace.kernels if place[1] in apart}
            seen = dataclasses.replace(trace, kernels=trace.kernels | kernels)
        plain = _shares(regions, seen, held, degree, known=known)
        for unit, share in plain.items():
            found[unit] = (*found.get(unit, ()), share)
        stretches, _ = sequences(model, trace.recording, regions, degree)
        for unit, share in (
            _shares([*regions, *stretches], seen, held, degree, known=known).items() if stretches else ()
        ):
            if share != plain.get(unit):
                found[unit] = (*found.get(unit, ()), dataclasses.replace(share, sequence=True))
    return found


def _calls_in_steps(trace: Trace, regions: Sequence[Region]) -> set[int]:
    """Return the calls of recurrent layers that are one operator by themselves, and not where they are divided."""
    roles = {module: role for region in regions for module, role in region.roles.items()}
    divided = {module for module, role in roles.items() if role.kind == "hidden" and not role.whole}
    places = {call.index for call in trace.recording.calls if call.module in divided}
    one = {place for (_, place), found in trace.kernels.items() if any(key.kind == "recurrent" for key in found)}
    return places & one


def divided_share(model: nn.Module, trace: Trace, regions: list[Region], degree: int) -> DividedShare:
    """Return how much of a model `degree` ranks divide by cutting these regions; `trace` counts no units."""
    held = Holding(list(model.parameters()), lambda _: 0)
    whole = trace.total(0)
    share = _shares(regions, trace, {0: held}, degree, known=False).get(0)
    if share is None:
        return DividedShare(0.0, 0.0, 0.0)
    (work,) = share.operations
    return DividedShare.of(
        degree, (held.nbytes()[0], whole.flops, whole.saved), (share.parameter_bytes, work.flops, work.saved_bytes)
    )


def operations_of(
    trace: Trace, unit: int, saved: tuple[float, float], part: Part = "shared",
    divided: Mapping[int, int] | None = None, *, known: bool,
) -> tuple[Operation, ...]:  # fmt: skip
    """Return what a unit does, as operations.

    `saved` are the bytes that it keeps for the backward pass, and how many of them do not grow with the batch;
    `divided` says by place of a call among how many ranks it is. Unless kernels are `known` apart, as where times are
    measured, all is one operation.
    """
    parts = divided or {}
    if not known:
        spent = Spent()
        for (where, call), did in trace.spent.items():
            if where == unit:
                spent.flops += did.flops / parts.get(call, 1)
                spent.moved += did.moved / parts.get(call, 1)
                spent.fixed += did.fixed / parts.get(call, 1)
                spent.calls += did.calls
        numbers, count = (spent.flops, spent.moved, saved[0]), max(1, spent.calls)
        return (Operation("forward", *numbers, part, count, fixed_bytes=spent.fixed, saved_fixed_bytes=saved[1]),)
    counted: dict[KernelKey, Tally] = {}
    for (where, call), kernels in trace.kernels.items():
        if where == unit:
            for key, one in kernels.items():
                counted.setdefault(key, Tally()).add(one, parts.get(call, 1))
    found = []
    for key, one in sorted(counted.items(), key=lambda row: (row[0].phase != "forward", row[0])):
        phase = key.phase if trace.passed_back else "both"
        name = key.name if phase != "backward" else f"{key.name} backward"
        kept, saved = (saved, (0.0, 0.0)) if phase != "backward" else ((0.0, 0.0), saved)
        numbers = (one.flops, one.moved, kept[0])
        found.append(
            Operation(
                name, *numbers, part, one.calls, fixed_bytes=one.fixed, phase=phase, number_format=key.number_format,
                kind=key.kind, performed_flops=one.performed if one.performed != one.flops else 0.0,
                saved_fixed_bytes=kept[1], inner_calls=one.inner_calls,
            )
        )  # fmt: skip
    if any(saved) or not found:
        none = Operation("kept", saved_bytes=saved[0], part=part, calls=0, phase="forward", saved_fixed_bytes=saved[1])
        found.insert(0, none)
    return tuple(found)


def _shares(
    regions: list[Region], trace: Trace, held: Mapping[int, Holding], degree: int, *, known: bool
) -> dict[int, Share]:
    roles = {module: role for region in regions for module, role in region.roles.items()}
    calls = trace.recording.calls
    divided = {index for region in regions for index in region.calls}
    computing = {
        m for m, role in roles.items() if role.kind in _COMPUTING and not (role.kind == "hidden" and role.whole)
    }
    divided |= {call.index for call in calls if call.module in computing}
    columns = {call.index for call in calls if call.module in roles and roles[call.module].kind == "column"}
    alone = {call.index: _kept_alone(call, roles[call.module], degree) for call in calls if call.module in roles}
    alone = {index: nbytes for index, nbytes in alone.items() if nbytes}
    cut = frozenset(id(tensor) for module, role in roles.items() for tensor, _ in cut_tensors(module, role))
    cut |= {id(one.parameter) for region in regions for one in region.tensors.values()}
    unit_of = _units_of_calls(trace)
    exchanged: dict[int, Counter[tuple[str, str, int, bool]]] = {}
    for one in exchanges(regions, trace.recording):
        key = (one.phase, one.kind, one.nbytes, one.with_batch)
        exchanged.setdefault(unit_of[one.call], Counter())[key] += 1
    kept: Counter[int] = Counter()
    for index, nbytes in alone.items():
        kept[unit_of[index]] += nbytes
    casts: Counter[int] = Counter()
    inside = divided - columns
    gathering = {(module, place) for region in regions for module, places in region.gathers.items() for place in places}
    gathered = {call.index for call in calls if (call.module, 0) in gathering}
    parts = {value for region in regions for value in region.parts}
    changed = {unit_of[index] for index in divided} | set(exchanged)
    for unit, call, storage, nbytes in trace.saved:
        if call in alone:
            continue
        # A layer that gathers parts of the sequence keeps what it has gathered. What is no value of the model's was
        # made inside of a call: a column layer keeps a copy of its whole input.
        values = trace.recording.storages.get(storage, [])
        is_part = call not in gathered and any(value in parts for value in values)
        cast = storage in trace.casts
        partly = is_part if values else call in (divided if cast else inside)
        kept[unit] += nbytes // degree if partly else nbytes
        casts[unit] += (nbytes // degree if partly else nbytes) if cast else 0
        if partly:
            changed.add(unit)
    changed |= {unit for unit, holding in held.items() if any(id(p) in cut for p in holding.parameters)}
    found = {}
    for unit in changed & set(held):
        saved = float(kept[unit]), float(casts[unit])
        work = operations_of(trace, unit, saved, "divided", dict.fromkeys(divided, degree), known=known)
        made = tuple(
            Exchange(phase, kind, nbytes, count, with_batch)
            for (phase, kind, nbytes, with_batch), count in exchanged.get(unit, Counter()).items()
        )
        found[unit] = Share(degree, *held[unit].nbytes(cut, degree), work, made)
    return found


def _units_of_calls(trace: Trace) -> dict[int, int]:
    """By place of a call, the unit in which it runs; calls that do nothing are in that of the call before."""
    known = {call: unit for unit, call in trace.spent}
    found, unit = {}, 0
    for index in range(len(trace.recording.calls)):
        found[index] = unit = known.get(index, unit)
    return found


def _kept_alone(call: Call, role: Role, degree: int) -> int:
    """Return what a layer keeps of its input that it has changed for itself; 0 where it keeps the input."""
    given = call.inputs[0]
    if role.kind == "row" and role.whole:  # it cuts its input
        return given.nbytes // degree
    if role.kind == "hidden" and not role.whole:
        return _kept_recurrent(call, degree)
    if role.kind == "vocabulary":  # ids within its rows, and a truth value for each
        return math.prod(given.shape) * (given.dtype.itemsize + 1)
    return 0


def _kept_recurrent(call: Call, degree: int) -> int:
    """Return what a recurrent layer keeps of which ranks have hidden units: what enters layers, and each step's gates.

    Of a rank's hidden units each step keeps 6 numbers (LSTM: four gates, two of cells), 7 (GRU) or 1, and all units of
    the step before.
    """
    layer: Any = call.module
    out, given = call.outputs[0], call.inputs[0]
    kept = 6 if isinstance(layer, nn.LSTM | nn.LSTMCell) else 7 if isinstance(layer, nn.GRU | nn.GRUCell) else 1
    layers = getattr(layer, "num_layers", 1)
    entering = 0 if isinstance(layer, nn.RNNCellBase) else given.nbytes + out.nbytes * (layers - 1)
    return int(entering + layers * out.nbytes * (1 + kept / degree))
