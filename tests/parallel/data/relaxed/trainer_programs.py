"""Programs that train by a plan with relaxed synchronisation, run by ranks."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import hocket
from hocket.planner import Plan, PlanError

from ... import programs

EPOCHS = 8  # a slow worker is to be seen to take fewer parts


def train(name: str, word: str, dtype: torch.dtype = torch.float64, *, slow_s: float = 0.0, **fields: Any) -> Any:
    """Losses of all samples after each epoch, the report, the samples that this rank trained, and its weights."""
    model, data, loss_fn = programs.setting(name, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=programs.BATCH, shuffle=True)
    trainer = hocket.Trainer(model, loss_fn, optimizer, Plan(synchronisation=word, **fields))
    samples, losses = [], []
    for _ in range(EPOCHS):
        for batch in trainer.batches(loader):
            if dist.is_initialized() and dist.get_rank() == 0:
                time.sleep(slow_s)
            samples.append(len(batch[-1]))
            trainer.step(batch)
        losses.append(trainer.evaluate(DataLoader(data, batch_size=5)))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return losses, trainer.report(), samples, weights.tolist(), trainer.plan.to_json()


def train_all(cases: list[tuple[Any, ...]], slow_s: float = 0.0) -> list[Any]:
    return [train(*case, slow_s=slow_s) for case in cases]


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
