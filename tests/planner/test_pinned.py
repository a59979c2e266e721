"""What is predicted of many plans stays what it was, to the last digits; see `pinned.json`.

Whoever changes a prediction on purpose runs `python -m pytest tests/planner/test_pinned.py --golden-update`, and reads
the diff.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.cluster import load
from hocket.planner import Constants, Network, Plan, predict
from hocket.workload import named_transformer

PINNED = Path(__file__).with_name("pinned.json")


def cases() -> Iterator[tuple[str, dict[str, Any], int]]:
    """A cluster, fields of a plan, and workers."""
    orders = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)]
    for where, workers in (("apart", 64), ("shared", 8)):
        for shard, tensor in itertools.product(("none", "gradients", "parameters"), (1, 2)):
            shared = {"shard": shard, "tensor_parallel_degree": tensor}
            for parts in (1, 3):
                yield where, {**shared, "accumulate": parts}, workers
            for (order, stages), pipeline, rounds in itertools.product(orders, (2, 4), (1, 3)):
                fields = {"pipeline_parallel_degree": pipeline, "micro_batches": pipeline * rounds}
                yield where, {**shared, **fields, "pipeline_schedule": order, "stages_per_rank": stages}, workers


def test_predictions_of_many_plans_are_what_they_were(request: pytest.FixtureRequest) -> None:
    apart = Network.of(load("selene-like"))
    networks = {"apart": apart, "shared": dataclasses.replace(apart, at_once=3.0)}
    workload = named_transformer("gpt-7b")
    found = {}
    for where, fields, workers in cases():
        batch = workers * fields.get("micro_batches", fields.get("accumulate", 1))
        one = predict(Plan(**fields), workload, networks[where], workers=workers, batch=batch, constants=Constants())
        parts = {name: seconds for name, seconds in one.parts.rows() if seconds}
        found[f"{where} {Plan(**fields).describe()}, {fields.get('accumulate', 1)}"] = parts | {
            "memory": float(one.memory.total)
        }
    if request.config.getoption("--golden-update"):
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(parts)}" for key, parts in found.items())
        PINNED.write_text(f"{{\n{lines}\n}}\n")
    pinned = json.loads(PINNED.read_text())
    assert found.keys() == pinned.keys()
    assert len(found) == 216
    for key, parts in pinned.items():
        assert found[key] == pytest.approx(parts, rel=1e-9), key
