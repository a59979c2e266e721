"""Spatial parallelism: each sample is divided along the first of its spatial dims (Dryden et al. 2019)."""

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


def _rules(plan: Plan) -> Iterator[PlanFinding]:
    if plan.shard == "parameters":
        rule = "parameters themselves cannot be sharded where samples are divided among workers"
        yield PlanFinding("shard", rule, 'say shard = "gradients"')
    if plan.embeddings != "replicated":
        rule = "embedding tables cannot be divided where samples are divided among workers"
        yield PlanFinding("embeddings", rule, 'say embeddings = "replicated"')
    if plan.recompute:
        rule = "shards of samples cannot be computed again in back-propagation"
        remedy = "say recompute = false, or a higher spatial_parallel_degree to save memory"
        yield PlanFinding("recompute", rule, remedy)


def _refused(plan: Plan, workload: Workload) -> Iterator[PlanFinding]:
    degree, known = plan.spatial_parallel_degree, workload.degrees("spatial")
    if degree not in known:
        rule = f"{workload.name} does not say how {degree} workers divide its samples"
        remedy = (
            f"use one of {', '.join(map(str, known))}" if known else "capture it with `dry_runs`, or measure the plan"
        )
        yield PlanFinding("spatial_parallel_degree", rule, remedy)


def _considered(workload: Workload, network: Network, degree: int) -> bool:
    """Return whether so many can share samples: a part of a host, or one on each host, which talk over the network."""
    return (network.local % degree == 0 or network.local == 1) and degree in workload.degrees("spatial")


def _reason(plan: Plan, parts: StepParts) -> str:
    return f"the fastest; rows at the borders of shards take {parts.tensor / parts.total:.0%} of the step"


SPATIAL = Axis(
    name="spatial",
    field="spatial_parallel_degree",
    divides="samples",
    does="each sample is divided, see [spatial parallelism](spatial-parallel.md)",
    costs="rows at the borders of shards, at every convolution",
    replicates=True,
    priced_by_shares=True,
    alone="samples that are divided among workers",
    own_group=True,  # halos must not wait for the reductions of gradients that go on beside them
    rules=_rules,
    refused=_refused,
    considered=_considered,
    reason=_reason,
)
