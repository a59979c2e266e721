"""Training on several ranks in which one thing is wrong."""

import gc
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from hocket.profile import phase

STEP_S = 0.01


class Rows(Dataset[torch.Tensor]):
    """Rows that take a while to load."""

    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.ones(16)


class Node:
    """One of many objects in circles, which the collector must look at."""

    def __init__(self) -> None:
        self.me = self


def train(fault: str, rank_at_fault: int, steps: int, size: float = 1.0) -> None:
    """Train `steps` steps; "loader", "compute", "sleep", "checkpoint", "garbage", "leak" on one rank, or "healthy"."""
    mine = dist.get_rank() == rank_at_fault
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = Rows(steps, size * STEP_S if fault == "loader" and mine else 0.0)
    kept: list[object] = []
    circles = [Node() for _ in range(1_000)] if fault == "garbage" and mine else []
    for step, row in enumerate(DataLoader(rows, batch_size=1)):
        time.sleep(STEP_S)  # computation that does not need a core, so that the machine's load does not matter
        optimizer.zero_grad()
        model(row).sum().backward()
        if mine and fault == "compute":
            slow_part(size * STEP_S)
        if mine and fault == "late compute" and step >= steps // 2:
            slow_part(size * STEP_S)
        if mine and fault == "garbage":
            for _ in range(int(size)):
                gc.collect()
        if mine and fault == "leak":
            kept.append(bytearray(b"x" * int(size * 2**20)))
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if fault == "checkpoint" and step % 5 == 4:
            with phase("checkpoint"):
                time.sleep(size * STEP_S)
    del circles


def slow_part(seconds: float) -> None:
    time.sleep(seconds)
