"""Data parallelism: every rank computes its part of each batch with the whole model."""

from typing import TYPE_CHECKING

from ._axis import Axis

if TYPE_CHECKING:
    from ..plan import Plan
    from ..step import StepParts


def _describe(plan: "Plan") -> str:
    degree = plan.data_parallel_degree
    among = f" among {plan.shard_degree}" if plan.shard_degree else ""
    sharded = f" ({plan.shard} sharded{among})" if plan.shard != "none" else ""
    return f"{'all' if degree == -1 else degree} data{sharded}"


def _reason(plan: "Plan", parts: "StepParts") -> str:
    return "what tensors and stages leave of the workers"


DATA = Axis(
    name="data",
    field="data_parallel_degree",
    divides="batch",
    does="each rank computes its part of every batch; gradients are averaged in buckets while back-propagation goes on",
    costs="an all_reduce of the gradients",
    settings={"shard": "shard", "shard_degree": "shard_degree"},
    replicates=True,
    describe=_describe,
    reason=_reason,
)
