"""Tensor and sequence parallelism: each layer is divided among ranks (Megatron, Korthikanti et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hocket.workload import Workload

from .._findings import PlanFinding
from ._axis import Axis

if TYPE_CHECKING:
    from ..network import Network
    from ..plan import Plan
    from ..step import StepParts


def _describe(plan: Plan) -> str:
    return f"{plan.tensor_parallel_degree} tensor{' (sequence too)' if plan.sequence_parallel else ''}"


def _divided(workload: Workload, degree: int) -> bool:
    """Return whether some layer is divided among so many; the others are done by all of them."""
    return any(layer.share(degree).degree == degree for layer in workload.layers)


def _refused(plan: Plan, workload: Workload) -> Iterator[PlanFinding]:
    degree = plan.tensor_parallel_degree
    if not _divided(workload, degree):
        rule = f"no layer of {workload.name} can be divided among {degree} workers"
        yield PlanFinding("tensor_parallel_degree", rule, _remedy(workload))
        return
    known = any(share.sequence for layer in workload.layers for share in layer.shares if share.degree == degree)
    if plan.sequence_parallel and workload.degrees("tensor") and not known:
        rule = f"nothing between the divided layers of {workload.name} can work on parts of the sequence"
        yield PlanFinding("sequence_parallel", rule, "leave it out")


def _remedy(workload: Workload) -> str:
    """Return what to write for a degree that divides no layer."""
    if workload.degrees("tensor"):
        known = ", ".join(map(str, workload.degrees("tensor")))
        return f"use one of {known}, or tell capture(..., degrees=) of others"
    most = max((layer.tensor_limit for layer in workload.layers), default=1)
    return f"use a divisor of {most}" if most > 1 else "none of them is known to be divided by any number; use 1"


def _considered(workload: Workload, network: Network, degree: int) -> bool:
    """Return whether so many can share tensors: a part of a host, or one on each host, which talk over the network."""
    return (network.local % degree == 0 or network.local == 1) and _divided(workload, degree)


def _reason(plan: Plan, parts: StepParts) -> str:
    return f"the fastest; its exchanges take {parts.tensor / parts.total:.0%} of the step"


TENSOR = Axis(
    name="tensor",
    field="tensor_parallel_degree",
    divides="tensors",
    does="layers are divided, see [tensor parallelism](tensor-parallel.md); needs `sample=`",
    costs="collectives in every layer, on activations",
    settings={"sequence": "sequence_parallel"},
    priced_by_shares=True,
    sampled=True,
    elementwise=True,
    describe=_describe,
    refused=_refused,
    considered=_considered,
    reason=_reason,
)
