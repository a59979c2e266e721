"""What ranks that share tensors send to the next stage: a part each, between hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hocket.parallel.compose import Trainer, _compose
from hocket.parallel.mesh.world import World, current
from hocket.parallel.pipeline import StageWire
from hocket.planner import Plan
from hocket.testing import run_ranks


def values() -> list[torch.Tensor]:
    torch.manual_seed(3)
    wide = torch.randn(128, 256)
    return [
        wide.requires_grad_(),
        wide.detach().t(),
        wide.detach() > 0,
        torch.randn(64, 256, dtype=torch.complex64),
        torch.randint(9, (128, 128)),
        wide.detach().bfloat16(),
        torch.randn(64 * 257 + 1),  # no half of it
        torch.randn(8),
        torch.randn(()),
        torch.empty(0, 4),
    ]


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Have the elements of each message counted."""
    counts: list[int] = []
    plain = dist.isend

    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counts.append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    dist.isend = isend
    try:
        yield counts
    finally:
        dist.isend = plain


def crossing() -> tuple[list[int], bool]:
    pipelines, sharers = ([dist.new_group(pair) for pair in pairs] for pairs in ([[0, 2], [1, 3]], [[0, 1], [2, 3]]))
    rank = dist.get_rank()
    wire = StageWire(World(rank // 2, 2, pipelines[rank % 2]), alike=World(rank % 2, 2, sharers[rank // 2]))
    sent, expected = values(), values()
    for _ in range(2):  # with a description, and without
        with counted() as counts:
            if rank < 2:
                wire.send_values(1, (), sent)
                wire.drain()
            else:
                got, works = wire.receive_values(0, (), torch.device("cpu"))
                wire.wait(works)
    same = rank < 2 or all(
        torch.equal(a, b) and a.dtype == b.dtype and a.requires_grad == b.requires_grad
        for a, b in zip(got, expected, strict=True)
    )
    return counts, same


def test_each_rank_sends_its_part_of_what_is_large_and_all_of_the_rest() -> None:
    whole = [value.numel() for value in values()]
    halves = [count if number in (6, 7, 8, 9) else count // 2 for number, count in enumerate(whole)]
    for rank, (counts, same) in enumerate(run_ranks(crossing, 4)):
        assert same
        assert counts == (halves if rank < 2 else [])


def trained(hosts: int, plan: Plan | None) -> tuple[list[float], list[int]]:
    def on_several_hosts(world: World) -> bool:
        return hosts > 1 and len({dist.get_global_rank(world.group, r) // 2 for r in range(world.size)}) > 1

    _compose.on_several_hosts = on_several_hosts  # type: ignore[attr-defined]
    torch.manual_seed(4)
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())]
    model = nn.Sequential(*layers).double()
    batch = torch.randn(256, 128).double(), torch.randn(256, 128).double()
    trainer = Trainer(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), plan, sample=batch[:1])
    with counted() as counts:
        losses = [float(trainer.step(batch)) for _ in range(3)]
    return losses, counts if current().size > 1 else []


def inside_and_between(plan: Plan) -> tuple[tuple[list[float], list[int]], tuple[list[float], list[int]]]:
    return trained(1, plan), trained(2, plan)


@pytest.mark.long
def test_pipelines_of_tensor_ranks_send_half_between_hosts_with_the_losses_of_one_process() -> None:
    plan = Plan(tensor_parallel_degree=2, pipeline_parallel_degree=2, micro_batches=2)
    (expected, _) = run_ranks(trained, 1, 1, None)[0]
    found = run_ranks(inside_and_between, 4, plan, timeout_s=120)
    activation = 128 * 128  # samples of a micro-batch, features
    for (losses, whole), (others, parts) in found:
        assert losses == pytest.approx(expected, rel=1e-12)
        assert others == pytest.approx(expected, rel=1e-12)
        assert activation in whole
        assert activation not in parts
        assert activation // 2 in parts
