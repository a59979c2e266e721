"""What a rank holds of a model's state is what the formulas say; and a model too large for one rank trains on four."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.parallel import StateBytes
from hocket.planner import Plan
from hocket.testing import run_ranks

MIB = 2**20
M_MMAP_THRESHOLD = -3  # of malloc.h


def state(plan: Plan, optimizer: str) -> tuple[StateBytes, dict[str, Any]]:
    """Bytes between a step's back-propagation and the next one's, and the report."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
    made: torch.optim.Optimizer
    if optimizer == "Adam":
        made = torch.optim.Adam(model.parameters())
    else:
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, made, plan, sample=torch.ones(2, 128))
    trainer.step((torch.ones(8, 128), torch.ones(8, 128)))
    return trainer.memory(), trainer.report()


def all_states(cases: list[tuple[Plan, str]]) -> list[Any]:
    return [state(*case) for case in cases]


def test_bytes_of_state_are_those_of_the_formulas() -> None:
    size = 8 * (128 * 128 + 128)  # parameters
    wanted = {  # bytes a parameter of weights, gradients and optimizer state, on 4 ranks
        Plan(): (4, 4, 8),
        Plan(shard="optimizer"): (4, 4, 8 / 4),
        Plan(shard="gradients"): (4, 4 / 4, 8 / 4),
        Plan(shard="parameters"): (4 / 4, 4 / 4, 8 / 4),
        Plan(tensor_parallel_degree=4): (4 / 4, 4 / 4, 8 / 4),
        Plan(pipeline_parallel_degree=4, split=("2", "4", "6"), micro_batches=4): (4 / 4, 4 / 4, 8 / 4),
        Plan(tensor_parallel_degree=2, shard="gradients"): (4 / 2, 4 / 4, 8 / 4),
    }
    for ranks in run_ranks(all_states, 4, [(plan, "Adam") for plan in wanted]):
        for (found, report), (plan, factors) in zip(ranks, wanted.items(), strict=True):
            counted = (found.weights, found.gradients, found.optimizer)
            # Biases that stay whole, padding of buckets, and a step counter for each parameter are a few per cent.
            assert counted == pytest.approx([size * f for f in factors], rel=0.03), plan
            predicted = report["memory_predicted"]
            assert found.total == pytest.approx(predicted["total"], rel=0.03), plan


def limited(plan: Plan, spare_nbytes: int) -> list[float] | str:
    """The losses of a model of 64 MiB, in a process that can allocate `spare_nbytes` more than it has."""
    torch.manual_seed(0)
    # Without it glibc keeps what was freed between blocks still in use, up to as much as the whole model, by chance.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    if spare_nbytes:
        lines = Path("/proc/self/status").read_text().splitlines()
        (used_kib,) = (int(line.split()[1]) for line in lines if line.startswith("VmData:"))
        limit = used_kib * 1024 + spare_nbytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        trainer = hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan)
        x = torch.randn(4, 1024)
        return [float(trainer.step((x, -x))) for _ in range(2)]
    except (RuntimeError, MemoryError) as error:
        return str(error)


def test_a_model_whose_state_is_beyond_the_limit_of_a_process_trains_on_four() -> None:
    # 16 bytes a parameter are 256 MiB, and Adam needs 64 MiB more for a moment.
    spare = 256 * MIB
    (alone,) = run_ranks(limited, 1, Plan(), spare)
    assert isinstance(alone, str)
    assert "allocate" in alone
    (free,) = run_ranks(limited, 1, Plan(), 0)
    for losses in run_ranks(limited, 4, Plan(shard="parameters"), spare):
        assert losses == pytest.approx(free, rel=1e-4)
