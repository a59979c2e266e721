"""The layers of a captured workload, taken apart into the steps between which a pipeline can be cut."""

import dataclasses
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from ._workload import Layer, Workload


class WorkloadStep(NamedTuple):
    """One of the steps of a model's forward pass; before each there may be a cut.

    Attributes:
        name: Of the step, unlike that of any other.
        path: Of the module that it is or is in.
        forward_s: Seconds of its forward pass, as far as they can be measured apart from the others.
        backward_s: Likewise.
        crossing_bytes: What passes the cut before it in the forward pass, for the workload's batch.
        parameters: How many it uses that no step before it does.
        tensors: In so many tensors.
        tied_to: The first step before it with whose parameters it computes, too; "" if there is none.
    """

    name: str
    path: str
    forward_s: float
    backward_s: float
    crossing_bytes: int
    parameters: int = 0
    tensors: int = 0
    tied_to: str = ""


def refined(workload: Workload, steps: Sequence[WorkloadStep]) -> Workload:
    """Return the workload with what its layers consist of.

    What a layer takes and keeps is dealt to its steps by the time that they take, its parameters as they are used. A
    step that is in no layer counts for the layer before.

    Args:
        workload: Captured.
        steps: In the order of the forward pass, of a sample as large as the workload's batch.
    """
    home: list[int] = []
    for step in steps:
        inside = (
            index
            for index, layer in enumerate(workload.layers)
            if step.path == layer.name or step.path.startswith(f"{layer.name}.")
        )
        home.append(next(inside, home[-1] if home else 0))
    behind = [*(step.crossing_bytes for step in steps[1:]), 0]
    found: list[Layer] = [Layer("", "")] * len(steps)
    for index, layer in enumerate(workload.layers):
        mine = [place for place, where in enumerate(home) if where == index]
        for place, made in zip(mine, _apart(layer, [steps[place] for place in mine]), strict=True):
            found[place] = dataclasses.replace(made, output_bytes=float(behind[place]))
    return dataclasses.replace(workload, finer=tuple(found))


def _apart(layer: Layer, steps: Sequence[WorkloadStep]) -> list[Layer]:
    if not steps:
        return []
    forward, backward, both, weights, tensors = (
        _shares(column)
        for column in (
            [one.forward_s for one in steps],
            [one.backward_s for one in steps],
            [one.forward_s + one.backward_s for one in steps],
            [one.parameters for one in steps],
            [one.tensors for one in steps],
        )
    )
    parameters, held, gradients, state = (
        _dealt(whole, weights)
        for whole in (layer.parameters, layer.parameter_bytes, layer.gradient_bytes, layer.optimizer_bytes)
    )
    counted = _dealt(layer.tensors, tensors)
    # What passes for a moment passes at the end, where the loss is; before, in part.
    saved = sum(one.saved_bytes - one.saved_fixed_bytes for one in layer.operations)
    passing = layer.peak_bytes - saved
    last = len(steps) - 1
    peaks = [max(0.0, share * saved + passing * (1 if number == last else share)) for number, share in enumerate(both)]
    if not layer.peak_bytes:
        peaks = [0.0] * len(steps)
    found = []
    for number, step in enumerate(steps):
        share = both[number]
        found.append(
            Layer(
                step.name,
                layer.kind,
                parameters[number],
                held[number],
                gradients[number],
                state[number],
                peak_bytes=peaks[number],
                peak_fixed_bytes=layer.peak_fixed_bytes,
                update_bytes=layer.update_bytes if gradients[number] else 0.0,  # which has the largest is not known
                tensors=counted[number],
                operations=tuple(one.over(1 / share) for one in layer.operations) if share else (),
                forward_s=layer.forward_s * forward[number],
                backward_s=layer.backward_s * backward[number],
                fixed_share=layer.fixed_share,
                block=layer.name,
                launch_s=layer.launch_s * share,
                tied_to=step.tied_to,
            )
        )
    return found


def _shares(values: Sequence[float]) -> list[float]:
    """Parts of 1 in proportion to some numbers; even ones if all are 0."""
    total = sum(values)
    return [value / total if total else 1 / len(values) for value in values]


def _dealt(whole: int, shares: Sequence[float]) -> list[int]:
    """Integers in proportion to the shares that sum to the whole."""
    ends = [0, *(round(whole * end) for end in accumulate(shares))]
    ends[-1] = whole
    return [end - begin for begin, end in pairwise(ends)]
