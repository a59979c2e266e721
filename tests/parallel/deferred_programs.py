"""Programs that train models which were built without memory, run by ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hocket
from hocket.planner import Plan

from .prediction_programs import Gpt, loss_of, words

WIDTH = 96  # most weights are larger than what is made at once


class Initialised(Gpt):
    """A GPT with tied weights that initialises itself as most do: everything again, and then some once more."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH)
        self.head.weight = self.words.weight
        self.register_buffer("mask", torch.tril(torch.ones(130, 130)), persistent=False)
        self.apply(self.initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.trunc_normal_(parameter, std=0.02 / 8**0.5)
        self.rates = [float(rate) for rate in torch.linspace(0, 1, 20000)[::5000]]
        self.double()

    def initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


def grouped(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    kept = list(parameters)
    weights, others = [p for p in kept if p.ndim > 1], [p for p in kept if p.ndim == 1]
    return torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}], lr=1e-3)


def losses(trainer: hocket.Trainer, steps: int) -> list[float]:
    return [float(trainer.step((words(8, 9 + n), words(8, 9 + n)))) for n in range(steps)]


def plain() -> tuple[list[float], list[float]]:
    torch.manual_seed(1)
    model = Initialised()
    trainer = hocket.Trainer(model, loss_of, grouped(model.parameters()), Plan(), sample=(words(8, 9),))
    found = losses(trainer, 3)
    return found, torch.rand(3).tolist()


def train(plans: list[Plan], directory: str) -> list[Any]:
    """Under each plan: the losses, what a model without weights says, and its losses with weights that were saved."""
    found = []
    for number, plan in enumerate(plans):
        torch.manual_seed(1 + dist.get_rank() * number)  # rank 0's numbers count
        model = hocket.deferred(Initialised)
        optimizer = grouped(model.parameters())
        meta = all(p.is_meta for p in model.parameters() if p.ndim > 1 and p.shape[1] == WIDTH > 29 and len(p) >= WIDTH)
        trainer = hocket.Trainer(model, loss_of, optimizer, plan, sample=(words(8, 9),))
        first = losses(trainer, 2)
        trainer.save(f"{directory}/{number}")
        first += [float(trainer.step((words(8, 11), words(8, 11))))]
        drawn = torch.rand(3).tolist()
        with torch.device("meta"):
            empty = Gpt(width=WIDTH).double()
        empty.head.weight = empty.words.weight
        said = ""
        again = hocket.Trainer(empty, loss_of, grouped, plan, sample=(words(8, 9),))
        try:
            losses(again, 1)
        except RuntimeError as error:
            said = str(error)
        again.load(f"{directory}/{number}")
        settings = [group["weight_decay"] for group in optimizer.param_groups]
        resumed = float(again.step((words(8, 11), words(8, 11))))
        found.append((first, drawn, meta, said, resumed, settings, optimizer is trainer.optimizer))
    torch.manual_seed(1)
    function = hocket.Trainer(Initialised, loss_of, torch.optim.SGD, Plan(shard="parameters"))
    return [found, losses(function, 1)]
