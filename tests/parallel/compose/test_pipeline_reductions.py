"""When a pipeline reduces its gradients, which is what the planner takes for granted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.parallel.data import _reduction, _zero
from hocket.parallel.pipeline import _wire
from hocket.planner import Plan
from hocket.testing import run_ranks


def events(shard: str) -> list[str]:
    """What a rank of an interleaved pipeline does in a step, in the order of time."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, label in (
            (_reduction.BucketReduction, "post", "reduce"),
            (_zero.ReduceScatter, "post", "reduce"),
            (_wire.StageWire, "drain", "all messages have left"),
        ):
            patch.setattr(owner, name, noted(found, label, getattr(owner, name)))
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        for number, layer in enumerate(model):
            layer.register_full_backward_pre_hook(lambda *_, number=number: found.append(f"backward of {number}"))
        plan = Plan(
            data_parallel_degree=2, pipeline_parallel_degree=2, stages_per_rank=2, pipeline_schedule="interleaved",
            micro_batches=4, shard=shard, bucket_bytes=64,
        )  # fmt: skip
        x, optimizer = torch.randn(16, 8), torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan=plan, sample=x)
        for _ in range(2):
            found.clear()
            trainer.step((x, x))
    return found


def noted(found: list[str], label: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same, noted when it is over."""

    def calling(*args: Any, **how: Any) -> Any:
        result = call(*args, **how)
        found.append(label)
        return result

    return calling


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
def test_gradients_are_reduced_when_all_stages_of_a_rank_are_done(shard: str) -> None:
    for found in run_ranks(events, 4, shard, timeout_s=100):
        first = found.index("reduce")
        assert found.count("reduce") > 1
        assert "all messages have left" in found[:first]
        assert not any(event.startswith("backward") for event in found[first:])
        assert sum(event.startswith("backward") for event in found[:first]) == 8
