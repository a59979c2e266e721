"""What one step of each form communicates: counts and bytes as the formulas say."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import hocket
from hocket.planner import Plan
from hocket.profile import Recorder
from hocket.testing import run_ranks

WIDTH, LAYERS = 64, 4
GRADIENT_NBYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
BUCKETS = LAYERS  # of a layer each
LOSS = ("all_reduce", 12 * 8)  # what LossTally sums: the loss, its count, and what parts say of how they add up
MARKS = ("all_reduce", 4 * 2 * LAYERS)  # which parameters were used, by all ranks together
ORDER = 4 * 32  # bytes of the digest that follows them where blocks are gathered one by one


def one_step(plan: Plan) -> list[tuple[str, int]]:
    """Kinds and bytes of the operations of the third step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters())
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan)
    batch = torch.ones(8, WIDTH), torch.ones(8, WIDTH)
    for _ in range(2):
        trainer.step(batch)
    with Recorder() as recorder:
        trainer.step(batch)
    return [(event["kind"], event["nbytes"]) for event in recorder.events()[1:]]


def all_forms() -> dict[str, list[tuple[str, int]]]:
    layer = (WIDTH * WIDTH + WIDTH) * 4
    return {
        shard: one_step(Plan(shard=shard, bucket_bytes=layer))  # type: ignore[arg-type]
        for shard in ("none", "optimizer", "gradients", "parameters")
    }


def volume(events: list[tuple[str, int]], kind: str) -> tuple[int, int]:
    """How many operations of a kind, and their bytes in all."""
    sizes = [nbytes for found, nbytes in events if found == kind]
    return len(sizes), sum(sizes)


@functools.cache
def events_of_all_ranks() -> list[dict[str, list[tuple[str, int]]]]:
    return run_ranks(all_forms, 4)


def test_counts_and_bytes_of_a_step_are_those_of_the_formulas() -> None:
    for found in events_of_all_ranks():
        data = found["none"]
        assert data.count(LOSS) == 1
        marks = 4 * 2 * LAYERS  # at the end of the last bucket
        assert volume([e for e in data if e != LOSS], "all_reduce") == (BUCKETS, GRADIENT_NBYTES + marks)
        assert len(data) == BUCKETS + 1

        for shard in ("optimizer", "gradients"):
            events = found[shard]
            assert volume(events, "reduce_scatter") == (BUCKETS, GRADIENT_NBYTES)
            assert volume(events, "all_gather") == (BUCKETS, GRADIENT_NBYTES)
            assert sorted(e for e in events if e[0] == "all_reduce") == sorted([LOSS, MARKS])
            assert len(events) == 2 * BUCKETS + 2

        events = found["parameters"]
        # Gathered for the forward and again for the backward pass, but for the last layer, which is still there.
        assert volume(events, "reduce_scatter") == (LAYERS, GRADIENT_NBYTES)
        count, nbytes = volume(events, "all_gather")
        assert (count, nbytes) == (2 * LAYERS, 2 * GRADIENT_NBYTES)
        assert volume(events, "all_reduce") == (2, LOSS[1] + MARKS[1] + ORDER)


def on_the_wire(events: list[tuple[str, int]], n: int) -> float:
    """Bytes that a rank sends, by the bandwidth-optimal algorithms."""
    factors = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_gather": (n - 1) / n}
    return sum(factors[kind] * nbytes for kind, nbytes in events if nbytes > 100)


def test_sharded_states_cost_no_more_than_data_parallelism_and_sharded_parameters_half_as_much_again() -> None:
    found = events_of_all_ranks()[0]
    sent = {shard: on_the_wire(events, 4) for shard, events in found.items()}
    assert abs(sent["optimizer"] / sent["none"] - 1) < 0.01
    assert abs(sent["gradients"] / sent["none"] - 1) < 0.01
    assert abs(sent["parameters"] / sent["none"] - 1.5) < 0.01


class Pair(nn.Module):
    """A block of two layers, which a stage of a pipeline has one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x).relu())


def staged() -> list[tuple[str, int]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Pair() for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters())
    plan = Plan(pipeline_parallel_degree=2, micro_batches=2, shard="parameters", split=("2",))
    batch = torch.ones(8, WIDTH), torch.ones(8, WIDTH)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan, sample=batch[:1])
    trainer.step(batch)
    with Recorder() as recorder:
        trainer.step(batch)
    return [(event["kind"], event["nbytes"]) for event in recorder.events()[1:] if "nbytes" in event]


@pytest.mark.long
def test_stages_gather_the_blocks_of_the_model_and_not_their_layers() -> None:
    block = 2 * (WIDTH * WIDTH + WIDTH) * 4
    for events in run_ranks(staged, 4):
        moved = [
            (kind, nbytes) for kind, nbytes in events if kind in ("all_gather", "reduce_scatter") and nbytes > 2000
        ]
        assert {nbytes for _, nbytes in moved} == {block}
        # Two blocks, two micro-batches; FSDP2 fetches ahead in back-propagation, now and then for nothing.
        assert sum(kind == "reduce_scatter" for kind, _ in moved) == 2 * 2
        assert 2 * 2 <= sum(kind == "all_gather" for kind, _ in moved) <= 2 * 2 * 2 + 2
