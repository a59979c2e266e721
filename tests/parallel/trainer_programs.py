"""Programs that train by a plan, run by ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

import hocket
from hocket.planner import Plan

from . import programs


def train(name: str, optimizer_name: str, plan: Plan, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """The losses of a run, and a metric over the data at its end."""
    model, data, loss_fn = programs.setting(name, dtype)
    optimizer = programs.OPTIMIZERS[optimizer_name](model.parameters())
    loader = DataLoader(data, batch_size=programs.BATCH, shuffle=True)
    trainer = hocket.Trainer(model, loss_fn, optimizer, plan, sample=data.tensors[0][:4], **settings)
    losses = []
    for _ in range(programs.EPOCHS):
        for batch in trainer.batches(loader):
            losses.append(float(trainer.step(batch)))
    assert trainer.optimizer is optimizer
    return losses, trainer.evaluate(DataLoader(data, batch_size=5)), trainer.grad_norm


def train_all(cases: list[tuple[str, str, Plan]]) -> list[Any]:
    return [train(*case) for case in cases]
