"""Programs that train by a plan with relaxed synchronisation, run by ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import hocket
from hocket.planner import Plan, PlanError
from hocket.testing import deadline

from ... import programs

EPOCHS = 8


class Taken:
    """How many parts each rank has taken: the size of its file."""

    def __init__(self, path: str) -> None:
        self._paths = [Path(f"{path}-{rank}") for rank in range(dist.get_world_size())]

    def one(self) -> None:
        with self._paths[dist.get_rank()].open("ab") as file:
            file.write(b"x")

    def wait(self, parts: int) -> None:
        """Be slow: until each other rank has taken two more, or all have taken so many together."""
        end_s = time.monotonic() + deadline(5)
        while time.monotonic() < end_s:
            mine, *others = (path.stat().st_size if path.exists() else 0 for path in self._paths)
            if mine + 1 < min(others) or mine + sum(others) >= parts:
                break
            time.sleep(0.004)


def train(name: str, word: str, dtype: torch.dtype = torch.float64, *, folder: str = "", **fields: Any) -> Any:
    """Losses of all samples after each epoch, the report, the samples that this rank trained, and its weights.

    With a folder rank 0 is slow; where ranks may take as many parts as they come to, all others are before it.
    """
    model, data, loss_fn = programs.setting(name, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=programs.BATCH, shuffle=True)
    trainer = hocket.Trainer(model, loss_fn, optimizer, Plan(synchronisation=word, **fields))
    samples, losses = [], []
    taken = Taken(f"{folder}/{name}-{word}") if folder else None
    shared = taken is not None and dist.get_backend() == "hocket"  # an engine moves only when all take part
    for epoch in range(EPOCHS):
        for batch in trainer.batches(loader):
            if taken is not None:
                taken.one()
                if dist.get_rank() == 0:
                    parts = (epoch + 1) * len(loader) * dist.get_world_size()
                    taken.wait(parts) if word in ("stale:2", "hogwild") and shared else time.sleep(0.004)
            samples.append(len(batch[-1]))
            trainer.step(batch)
        losses.append(trainer.evaluate(DataLoader(data, batch_size=5)))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return losses, trainer.report(), samples, weights.tolist(), trainer.plan.to_json()


def train_all(cases: list[tuple[Any, ...]], folder: str) -> list[Any]:
    return [train(*case, folder=folder) for case in cases]


def with_fields(fields: dict[str, Any]) -> list[list[float]]:
    return [train("mlp", word, **fields)[0] for word in ("local:2", "stale:2", "hogwild")]


def go_on(word: str, directory: str) -> tuple[list[float], list[float]]:
    """Losses of two epochs, and of the second once more after a checkpoint was loaded by another trainer."""
    found = []
    for again in (False, True):
        model, data, loss_fn = programs.setting("mlp", torch.float64)
        loader = DataLoader(data, batch_size=programs.BATCH, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        trainer = hocket.Trainer(model, loss_fn, optimizer, Plan(synchronisation=word))
        if again:
            trainer.load(directory)
        losses = []
        for epoch in range(1 if again else 2):
            for batch in trainer.batches(loader):
                trainer.step(batch)
            losses.append(trainer.evaluate(DataLoader(data, batch_size=5)))
            if not again and epoch == 0:
                trainer.save(directory)
        found.append(losses)
    return found[0], found[1]


def refused() -> list[str]:
    model, _, loss_fn = programs.setting("mlp", torch.float64)
    found = []
    for plan in (
        {"synchronisation": "stale:2", "shard": "optimizer"},
        {"synchronisation": "hogwild", "sync_batch_norm": True},
    ):
        try:
            hocket.Trainer(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), Plan(**plan))  # type: ignore[arg-type]
        except PlanError as error:
            found.append(str(error))
    return found
