"""What a rank holds of a model's state is what the formulas say; and a model too large for one rank trains on four."""

from __future__ import annotations

import ctypes
import functools
import gc
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import hocket
from hocket.parallel import StateBytes
from hocket.parallel.state import give_back
from hocket.parallel.state.memory import counted, state_nbytes
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


@pytest.mark.long
def test_bytes_of_state_are_those_of_the_formulas() -> None:
    size = 8 * (128 * 128 + 128)  # parameters
    wanted = {  # bytes a parameter of weights, gradients and optimizer state, on 4 ranks
        Plan(): (4, 4, 8),
        Plan(shard="optimizer"): (4, 4, 8 / 4),
        Plan(shard="gradients"): (4, 4 / 4, 8 / 4),
        Plan(shard="parameters"): (4 / 4, 4 / 4, 8 / 4),
        Plan(shard="parameters", shard_degree=2): (4 / 2, 4 / 2, 8 / 2),
        Plan(tensor_parallel_degree=4): (4 / 4, 4 / 4, 8 / 4),
        Plan(pipeline_parallel_degree=4, split=("2", "4", "6"), micro_batches=4): (4 / 4, 4 / 4, 8 / 4),
        Plan(tensor_parallel_degree=2, shard="gradients"): (4 / 2, 4 / 4, 8 / 4),
    }
    for ranks in run_ranks(all_states, 4, [(plan, "Adam") for plan in wanted]):
        for (found, report), (plan, factors) in zip(ranks, wanted.items(), strict=True):
            counted = (found.weights, found.gradients, found.optimizer)
            # Biases that stay whole, padding of buckets, and a step counter for each parameter are a few per cent.
            assert counted == pytest.approx([size * f for f in factors], rel=0.03), plan
            assert found.total < report["process"]["resident"] <= report["process"]["peak"]
            predicted = report["memory_predicted"]
            assert found.total == pytest.approx(predicted["total"], rel=0.03), plan


def test_states_that_are_made_of_several_tensors_count_as_these_do() -> None:
    # As those in 8 bits, of numbers and scales: the outer tensors have no memory, and two of one size passed for one.
    layer = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(layer.parameters())
    states = {name: TwoTensor(torch.zeros(8, 8), torch.zeros(8, 8)) for name in ("mean", "square")}
    optimizer.state[layer.weight] = states
    assert counted([], [], optimizer).optimizer == 4 * 8 * 8 * 4


class _Own(torch.optim.Adam):
    """An optimizer of the program's."""


@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        (torch.optim.Adam, 8),
        (_Own, 8),
        (functools.partial(torch.optim.AdamW, amsgrad=True), 12),
        (torch.optim.SGD, 0),
        (functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True), 12),
        (torch.optim.Adafactor, 2 * 4 / 64),
    ],
)
def test_bytes_of_an_optimizer_s_state_are_predicted_as_it_keeps_them(make: Any, nbytes: float) -> None:
    assert state_nbytes(make(nn.Linear(8, 8).parameters())) == nbytes


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


@pytest.mark.long
def test_a_model_whose_state_is_beyond_the_limit_of_a_process_trains_on_four() -> None:
    # 16 bytes a parameter are 256 MiB, and Adam needs 64 MiB more for a moment.
    spare = 256 * MIB
    (alone,) = run_ranks(limited, 1, Plan(), spare)
    assert isinstance(alone, str)
    assert "allocate" in alone
    (free,) = run_ranks(limited, 1, Plan(), 0)
    for losses in run_ranks(limited, 4, Plan(shard="parameters"), spare):
        assert losses == pytest.approx(free, rel=1e-4)


class ReversedLayers(nn.Sequential):
    """Gradients arrive in another order than one expects, so that buckets are laid out anew in the second step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(list(self)):
            x = layer(x)
        return x


def large(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return ReversedLayers(*(nn.Linear(1024, 1024) for _ in range(layers)))


def resident_nbytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def peak_of_building(plans: list[Plan]) -> list[int]:
    """By how much the peak of resident memory rises while a model of 128 MiB is built and divided."""
    found = []
    x = torch.ones(2, 1024)
    for plan, layers in [*((plan, 4) for plan in plans), *((plan, 32) for plan in plans)]:  # the first of each imports
        gc.collect()
        give_back()
        before = resident_nbytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
        model = hocket.deferred(large, layers)
        trainer = hocket.Trainer(model, nn.functional.mse_loss, torch.optim.SGD, plan, sample=x)
        assert trainer.steps == 0
        found.append(resident_nbytes("VmHWM") - before)
        del model, trainer
    return found[len(plans) :]


@pytest.mark.long
def test_a_model_is_built_within_this_ranks_part_and_a_block() -> None:
    plans = [
        Plan(shard="parameters"),
        Plan(tensor_parallel_degree=2),
        Plan(pipeline_parallel_degree=2, micro_batches=2),
    ]
    for rank in run_ranks(peak_of_building, 2, plans):
        for plan, peak in zip(plans, rank, strict=True):
            # Its part is 64 MiB; of tensors that are made, 32 MiB are kept; a block and its gradients are 8 MiB. Pages
            # of libraries that are read for the first time, and what an allocator keeps of small tensors, are 12 to 20.
            assert peak < 64 * MIB + 32 * MIB + 8 * MIB + 24 * MIB, (plan, peak / MIB)


def peak_of_training() -> int:
    before = resident_nbytes("VmRSS")
    model = large(32)
    trainer = hocket.Trainer(model, nn.functional.mse_loss, torch.optim.AdamW(model.parameters()), Plan())
    x = torch.ones(2, 1024)
    for _ in range(3):
        trainer.step((x, x))
    return resident_nbytes("VmHWM") - before


@pytest.mark.long
def test_data_parallelism_takes_at_most_a_quarter_more_than_one_process() -> None:
    (alone,) = run_ranks(peak_of_training, 1)
    for peak in run_ranks(peak_of_training, 2):
        assert peak < 1.25 * alone, (peak / MIB, alone / MIB)
