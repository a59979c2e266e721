"""Training on several ranks in which one thing is wrong."""

import gc
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket.profile import note_value, phase

STEP_S = 0.01


class Rows(Dataset[torch.Tensor]):
    """Rows that take a while to load."""

    def __init__(self, count: int, seconds: float, every: int) -> None:
        self.count, self.seconds, self.every = count, seconds, every

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.every or index // self.every % 2 == 0:
            time.sleep(self.seconds)
        return torch.ones(16)


class Node:
    """One of many objects in circles, which the collector must look at."""

    def __init__(self) -> None:
        self.me = self


def train(fault: str, rank_at_fault: int, steps: int, size: float = 1.0, numel: int = 1, every: int = 0) -> None:
    """Train `steps` steps; with a fault on one rank, or healthy (any other word); `numel` more numbers are reduced.

    With `every`, so many steps are with the fault, and as many without it, by turns.
    """
    mine = dist.get_rank() == rank_at_fault
    more = torch.ones(numel)
    burners: list[int] = []
    if fault == "core":  # on two cores: one rank has one for itself, the other shares its own with other programs
        here, other = sorted(os.sched_getaffinity(0))[:2]
        os.sched_setaffinity(0, {here if mine else other})
        burners = [burner(os.getpid()) for _ in range(int(size) if mine else 0)]
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = Rows(steps, size * STEP_S if fault == "loader" and mine else 0.0, every)
    kept: list[object] = []
    circles = [Node() for _ in range(1_000)] if fault == "garbage" and mine else []
    if circles:
        gc.unfreeze()  # `run_ranks` has frozen what was imported, which takes a program of one's own its time
    for step, row in enumerate(DataLoader(rows, batch_size=1)):
        if fault == "core":
            compute()
        else:
            time.sleep(STEP_S)  # computation that does not need a core, so that the machine's load does not matter
        if mine and fault == "dead" and step == steps // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(row).sum().backward()
        if mine and fault == "compute" and (not every or step // every % 2 == 0):
            slow_part(size * STEP_S)
        if mine and fault == "late compute" and step >= steps // 2:
            slow_part(size * STEP_S)
        if mine and fault == "garbage":
            for _ in range(int(size)):
                gc.collect()
        if fault == "leak all" or (mine and fault == "leak"):
            kept.append(bytearray(b"x" * int(size * 2**20)))
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        dist.all_reduce(more)
        optimizer.step()
        if fault == "checkpoint" and step % 5 == 4:
            with phase("checkpoint"):
                time.sleep(size * STEP_S)
    del circles
    for pid in burners:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def slow_part(seconds: float) -> None:
    time.sleep(seconds)


def compute() -> int:
    return sum(range(300_000))  # some 5 ms of a core


def burner(parent: int) -> int:
    """Return the number of a process that uses its core for as long as its parent is there."""
    if pid := os.fork():
        return pid
    while os.getppid() == parent:
        compute()
    os._exit(0)


def pipeline(split: tuple[str, ...], steps: int) -> None:
    """Train eight equal layers in stages that begin with the layers of these names."""
    import hocket

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(384, 384) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(512, 384), torch.randn(512, 384)
    plan = hocket.Plan(pipeline_parallel_degree=dist.get_world_size(), micro_batches=8, split=split)
    trainer = hocket.Trainer(model, torch.nn.functional.mse_loss, optimizer, plan=plan, sample=inputs[:64])
    for _ in range(steps):
        trainer.step((inputs, targets))


def save_and_evaluate(folder: str) -> None:
    """Train by a Trainer that saves and evaluates; note how many seconds both took."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    trainer = hocket.Trainer(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.01))
    batch = (torch.ones(4, 16), torch.ones(4, 16))
    for step in range(8):
        trainer.step(batch)
        for name, call in (
            ("checkpoint", lambda: trainer.save(f"{folder}/checkpoint")),
            ("evaluation", lambda: trainer.evaluate([batch] * 50)),
        ):
            begin_s = time.perf_counter()
            call()
            note_value(name, time.perf_counter() - begin_s, step)
