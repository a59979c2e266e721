"""The plans by which the zoo is trained."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ZooPlan:
    """A column of the table.

    Attributes:
        fields: of the plan.
        ranks: how many it needs.
    """

    fields: dict[str, Any]
    ranks: int = 2


_T: dict[str, Any] = {"tensor_parallel_degree": 2}
_P: dict[str, Any] = {"pipeline_parallel_degree": 2}
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
}


def lines_of(log: Path) -> list[dict[str, Any]]:
    """What a rank has written so far; a line that is being written is left out."""
    return [json.loads(line) for line in log.read_text().split("\n")[:-1]] if log.exists() else []
