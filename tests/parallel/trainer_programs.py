"""Programs that train by a plan, run by ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from typing import Any

import torch
from torch.utils.data import DataLoader

import hocket
from hocket.calibrate import calibrate
from hocket.comm.scheduled._scheduled import table_of
from hocket.parallel.mesh.world import join
from hocket.parallel.partition.tensor import parallelize
from hocket.planner import Plan, PlanError, admissible_plans
from hocket.testing import deadline

from . import programs


def train(name: str, optimizer_name: str, plan: Plan, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """The losses of a run, and a metric over the data at its end."""
    model, data, loss_fn = programs.setting(name, dtype)
    optimizer = programs.optimizer_of(optimizer_name, model.parameters())
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


def train_by_measurement() -> Any:
    """The losses of a run by a plan that was measured, the plan, what is said where there is too little, and lines.

    The lines are those of a second Trainer, which takes what is kept in the cache.
    """
    model, data, loss_fn = programs.setting("mlp", torch.float64)
    optimizer = programs.OPTIMIZERS["adam"](model.parameters())
    inputs = data.tensors[0]
    refused = []
    for sample in (None, inputs[:1], data[: programs.BATCH]):  # the last with targets
        try:
            hocket.Trainer(model, loss_fn, optimizer, "auto", sample=sample)
        except PlanError as error:
            refused.append(str(error))
    hocket.calibrate.auto_plan = functools.partial(hocket.calibrate.auto_plan, seconds=1)
    trainer = hocket.Trainer(model, loss_fn, optimizer, "auto", sample=inputs[: programs.BATCH])
    loader = DataLoader(data, batch_size=programs.BATCH, shuffle=True)
    losses = [float(trainer.step(batch)) for _ in range(programs.EPOCHS) for batch in trainer.batches(loader)]
    model, _, _ = programs.setting("mlp", torch.float64)
    optimizer = programs.OPTIMIZERS["adam"](model.parameters())
    with contextlib.redirect_stderr(io.StringIO()) as lines:
        again = hocket.Trainer(model, loss_fn, optimizer, "auto", sample=inputs[: programs.BATCH])
    same = again.plan.to_json() == trainer.plan.to_json()
    return losses, trainer.plan.to_json(), refused, (same, lines.getvalue())


def with_choices(table: str, missing: str) -> tuple[str, str]:
    """The algorithm of an all_reduce under a plan that names a table, and what is said where there is none."""
    refused = ""
    try:
        for path in (table, missing):
            model, _, loss_fn = programs.setting("mlp", torch.float32)
            hocket.Trainer(model, loss_fn, programs.optimizer_of("sgd", model.parameters()), Plan(choices=path))
            chosen = table_of(2).pick("all_reduce", world=2, nbytes=1 << 20)
    except PlanError as error:
        refused = str(error)
    return chosen.algorithm, refused


def divide_what_was_measured() -> dict[str, Any]:
    """What calibration says of dividing tensors, and what becomes of the model that it measured when it is divided."""
    model, data, _ = programs.setting("mlp", torch.float32)
    inputs = data.tensors[0][: programs.BATCH]
    optimizer = programs.OPTIMIZERS["adam"](model.parameters())
    before, random = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    found = calibrate(model, optimizer, (inputs,), seconds=deadline(3))
    same = [torch.equal(before[key], value) for key, value in model.state_dict().items()]
    untouched = all(same) and not optimizer.state and torch.equal(random, torch.random.get_rng_state())
    plans = admissible_plans(found.workload, found.network, workers=2, batch=len(inputs))
    divided = parallelize(model, join(), (inputs[:4],))
    return {
        "degrees": found.workload.degrees(),
        "exchange_s": found.constants.exchange_s,
        "exchange_share": found.constants.exchange_share,
        "considered": sorted({plan.tensor_parallel_degree for plan in plans}),
        "said": sum(layer.share(2).parameter_bytes for layer in found.workload.layers),
        "held": sum(p.numel() * p.element_size() for p in model.parameters()),
        "whole": found.workload.parameter_bytes,
        "refused": divided.refused,
        "untouched": untouched and all(parameter.grad is None for parameter in model.parameters()),
        "ran": [(run.plan.resolve(2).describe(), run.step_s) for run in found.runs],
        "at_once": found.network.at_once,
    }


def part_of_a_run(plan: Plan, load: str = "", save: str = "", until: int = 11, name: str = "conv") -> list[float]:
    """The losses of a run that may go on from the checkpoint `load`, and may end with the checkpoint `save`.

    With a frozen parameter, two groups of parameters and a schedule; steps are counted over epochs of three batches.
    """
    model, data, loss_fn = programs.setting(name, torch.float64)
    next(model.parameters()).requires_grad_(False)
    if load:  # what is loaded must not depend on what was there
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
    loader = DataLoader(data, batch_size=programs.BATCH, shuffle=True)
    trainer = hocket.Trainer(model, loss_fn, optimizer, plan, sample=data.tensors[0][:4])
    if load:
        schedule.load_state_dict(trainer.load(load))
    return train_until(until, trainer, loader, schedule, save)


def train_until(until: int, trainer: hocket.Trainer, loader: Any, schedule: Any, save: str) -> list[float]:
    """Trains until so many steps are made, and ends with the checkpoint `save`, if that is not empty; the losses."""
    losses = []
    while trainer.steps < until:
        for batch in trainer.batches(loader):
            losses.append(float(trainer.step(batch)))
            schedule.step()
            if trainer.steps == until:
                break
    if save:
        trainer.save(save, schedule.state_dict())
    return losses


def averages_kept(plan: Plan, path: str) -> list[str]:
    """What is said where a checkpoint is to keep averages: of the Trainer's model, of whole weights, and others."""
    model, data, loss_fn = programs.setting("mlp", torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hocket.Trainer(model, loss_fn, optimizer, plan, sample=data.tensors[0][:4])
    averages: list[Any] = [
        {name: p.detach().clone() for name, p in trainer.model.named_parameters()},
        {name: one * 0.9 for name, one in trainer.state_dict().items()},
        torch.ones([]) * torch.distributed.get_rank(),
    ]
    said = []
    for one in averages:
        try:
            trainer.save(path, {"average": one, "epoch": 1})
            said.append("")
        except hocket.parallel.CheckpointError as error:
            said.append(str(error))
    trainer.resume(f"{path} of resume", extra=lambda: averages[0])
    try:
        for batch in trainer.batches(DataLoader(data, batch_size=programs.BATCH)):
            trainer.step(batch)
            break
    except hocket.parallel.CheckpointError:
        said.append(f"refused before step {trainer.steps}")
    return said


class _Scaled(torch.nn.Module):
    """With a parameter that has no dimension, and one that has no element."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 1)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.none = torch.nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale + self.none.sum()


def scalar_there_and_back(path: str) -> tuple[list[float], list[str]]:
    """The losses of a run that goes on from plan to plan, with a parameter that has no dimension; its state's keys."""
    losses, keys = [], [""]
    for i, shard in enumerate(("none", "gradients", "optimizer", "none")):
        torch.manual_seed(0)
        model, x, y = _Scaled().double(), torch.randn(8, 3).double(), torch.randn(8, 1).double()
        adam = torch.optim.Adam(model.parameters(), lr=0.1)
        trainer = hocket.Trainer(model, torch.nn.functional.mse_loss, adam, Plan(shard=shard))
        if i:
            trainer.load(f"{path}/{i - 1}")
        losses += [float(trainer.step((x, y))) for _ in range(2)]
        trainer.save(f"{path}/{i}")
        keys = list(hocket.read_state_dict(f"{path}/{i}"))
    return losses, keys


def parts_of_runs(cases: list[tuple[Any, ...]]) -> list[list[float]]:
    return [part_of_a_run(*case) for case in cases]


class Noisy(torch.optim.SGD):
    """Adds random numbers to the weights, as stochastic gradient Langevin dynamics does."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            p.add_(torch.randn_like(p), alpha=1e-3)


def noisy_updates(dropout: float = 0.1) -> tuple[list[torch.Tensor], str]:
    """The weights after steps with such an optimizer and batches of 7, and how plans that divide refuse it."""

    def trainer(plan: Plan) -> hocket.Trainer:
        torch.manual_seed(0)
        parts = torch.nn.Linear(6, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 3)
        model = torch.nn.Sequential(*parts).double()
        optimizer = Noisy(model.parameters(), lr=0.1)
        return hocket.Trainer(model, torch.nn.functional.mse_loss, optimizer, plan, sample=torch.zeros(4, 6).double())

    refused = ""
    if join().size > 1:
        for plan in (Plan(shard="optimizer"), Plan(pipeline_parallel_degree=2, micro_batches=2)):
            try:
                trainer(plan)
            except PlanError as error:
                refused += str(error)
    one, generator = trainer(Plan()), torch.Generator().manual_seed(1)
    for _ in range(3):
        batch = [torch.randn(7, n, generator=generator, dtype=torch.float64) for n in (6, 3)]
        one.step(batch)
    return [p.detach() for p in one.model.parameters()], refused


class TensorKept(torch.nn.Sequential):
    """Keeps a tensor besides its weights, by `get_extra_state`, as Transformer Engine's modules do."""

    kept = torch.arange(3)

    def get_extra_state(self) -> torch.Tensor:
        return self.kept

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.kept = state


def tensor_kept(path: str) -> list[list[int]]:
    """What such a model keeps after loading a checkpoint, a whole state dict, and a checkpoint once more."""
    model = TensorKept(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    plan = Plan(pipeline_parallel_degree=join().size, micro_batches=join().size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hocket.Trainer(model, torch.nn.functional.mse_loss, optimizer, plan, sample=torch.zeros(4, 6))
    batch = torch.ones(4, 6), torch.ones(4, 3)
    trainer.save(path)
    found = []
    for load in (trainer.load, trainer.load_state_dict, trainer.load):
        source = trainer.state_dict() if load == trainer.load_state_dict else path
        model.kept = torch.zeros(3, dtype=torch.int64)
        load(source)  # type: ignore[arg-type]
        trainer.step(batch)
        found.append(model.kept.tolist())
    return found
