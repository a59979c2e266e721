"""What a rank allocates in a step of a plan, beside what is predicted of devices with memory of their own."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import hocket
from hocket.planner import Plan, memory_of
from hocket.testing import run_ranks
from hocket.workload import Workload, capture

BATCH, TOKENS, WIDTH, CLASSES = 8, 32, 32, 2_000


class _Language(nn.Module):
    """Whose logits are larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4))
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens))))
        return out


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _tokens() -> Tensor:
    return torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS) % CLASSES


def _step(plan: dict[str, Any]) -> tuple[int, int]:
    """Bytes of weights and the optimizer's state, and the most that a step allocates besides."""
    torch.manual_seed(0)
    model, tokens = _Language(), _tokens()
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    trainer = hocket.Trainer(model, _loss, optimizer, Plan.from_json(plan), sample=(tokens,))
    for _ in range(3):
        trainer.step((tokens, tokens))
    state = trainer.memory()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        trainer.step((tokens, tokens))
    events = seen.profiler.kineto_results.events()
    now = most = 0
    for _, nbytes in sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"):
        now += nbytes
        most = max(most, now)
    return state.weights + state.optimizer, most


@pytest.fixture(scope="module")
def workload() -> Workload:
    with torch.device("meta"):
        model = _Language()
    tokens = _tokens()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return _loss(model(**batch), batch["tokens"])

    return capture(model, {"tokens": tokens}, device="meta", loss=loss, degrees=(2,))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        (Plan(), 1),
        (Plan(accumulate=2), 1),
        (Plan(), 2),
        (Plan(accumulate=2), 2),
        (Plan(shard="optimizer"), 2),
        (Plan(shard="optimizer", accumulate=2), 2),
        (Plan(shard="gradients"), 2),
        (Plan(shard="parameters"), 2),
        (Plan(tensor_parallel_degree=2), 2),
        (Plan(pipeline_parallel_degree=2, micro_batches=2, split=("blocks.2.0",)), 2),
    ],
    ids=lambda one: one.describe() if isinstance(one, Plan) else str(one),
)
def test_the_peak_of_a_plan_is_what_its_ranks_allocate(workload: Workload, plan: Plan, ranks: int) -> None:
    found = run_ranks(_step, ranks, plan.to_json(), timeout_s=100)
    plan = plan.resolve(ranks)
    for rank, (state, most) in enumerate(found):
        stage = rank if plan.pipeline_parallel_degree > 1 else None
        said = memory_of(plan, workload, batch=BATCH, rank=stage)
        # Buckets, and what is gathered, are in shared memory on the CPU, where no allocator counts them.
        # A device's come with the gradients where nothing is sharded, and none is there at the fullest moment.
        added_up = ranks > 1 and plan.accumulate > 1
        in_buckets = said.gradients if plan.shard in ("optimizer", "gradients") or added_up else 0
        tensors = dataclasses.replace(said, buffers=0.0).total - in_buckets
        assert tensors == pytest.approx(state + most, rel=0.02)  # what stages send is there for a moment more or less
