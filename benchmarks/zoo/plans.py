"""The plans by which the zoo is trained: those of the table in docs/models.md, and others that were tried once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ZooPlan:
    """A column of the table.

    Attributes:
        fields: of the plan.
        ranks: how many it needs.
        later: fields of the plan by which training goes on from its checkpoint.
    """

    fields: dict[str, Any]
    ranks: int = 2
    later: dict[str, Any] = field(default_factory=dict)


_T: dict[str, Any] = {"tensor_parallel_degree": 2}
_P: dict[str, Any] = {"pipeline_parallel_degree": 2}
_AGAIN: dict[str, Any] = {"accumulate": 2, "recompute": True, "clip_norm": 0.1}
PLANS = {
    "data": ZooPlan({}),
    "optimizer": ZooPlan({"shard": "optimizer"}),
    "gradients": ZooPlan({"shard": "gradients"}),
    "parameters": ZooPlan({"shard": "parameters"}),
    "tensor": ZooPlan(_T),
    "sequence": ZooPlan({**_T, "sequence_parallel": True}),
    "pipeline-2": ZooPlan({**_P, "micro_batches": 2, "pipeline_schedule": "gpipe"}),
    "pipeline-4": ZooPlan({**_P, "micro_batches": 4}),
    "hybrid": ZooPlan({**_T, **_P, "micro_batches": 2}, ranks=4),
    "data-pipeline": ZooPlan({**_P, "micro_batches": 2}, ranks=4),
    "data-tensor": ZooPlan({**_T, "shard": "gradients"}, ranks=4),
    "interleaved": ZooPlan(
        {**_P, "micro_batches": 2, "pipeline_schedule": "interleaved", "stages_per_rank": 2},
        later={"shard": "parameters"},
    ),
    "zero-bubble": ZooPlan({**_P, "micro_batches": 4, "pipeline_schedule": "zero_bubble"}, later=_T),
    "accumulate": ZooPlan({**_AGAIN, "shard": "gradients"}, later={**_P, "micro_batches": 2}),
    "tensor-clip": ZooPlan({**_T, **_AGAIN}, later={"shard": "optimizer"}),
    "parameters-again": ZooPlan({"shard": "parameters", "accumulate": 2, "recompute": True}, later=_T),
    "tensor-parameters": ZooPlan({**_T, "shard": "parameters"}, ranks=4, later={**_T, **_P, "micro_batches": 2}),
    "pipeline-optimizer": ZooPlan(
        {**_P, "micro_batches": 2, "shard": "optimizer", "recompute": True}, ranks=4, later={"shard": "parameters"}
    ),
    "hsdp": ZooPlan({"shard": "parameters", "shard_degree": 2}, ranks=4, later={**_P, "micro_batches": 2}),
    "spatial": ZooPlan({"spatial_parallel_degree": 2}, later={"shard": "parameters"}),
}
TABLE = list(PLANS)[:11]
"""The columns of the table."""


def lines_of(log: Path) -> list[dict[str, Any]]:
    """What a rank has written so far; a line that is being written is left out."""
    return [json.loads(line) for line in log.read_text().split("\n")[:-1]] if log.exists() else []
