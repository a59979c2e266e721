"""What ranks do in the tests of the pipeline."""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import torch
from torch import nn

from hocket.parallel.mesh.world import World, current
from hocket.parallel.pipeline import Pipeline, Stage, split
from hocket.schedule.pipeline import stage_homes

from .models import MODELS

Case = dict[str, Any]


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.Adam(parameters, lr=1e-3)


def alone(case: Case) -> tuple[list[float], dict[str, Any]]:
    """Losses and final parameters of one process."""
    made = MODELS[case["model"]]
    torch.manual_seed(1)
    model = made.made()
    optimizer = optimizer_of(case.get("optimizer", "sgd"), model.parameters())
    losses = []
    for step, samples in enumerate(case["sizes"]):
        *inputs, target = made.batch_of(step, samples)
        loss = made.loss_fn(model(*inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach().numpy() for name, p in model.named_parameters()}


class Parts(NamedTuple):
    """A model that is split, this rank's stages of it, and the numbers that it has at first."""

    model: nn.Module
    stages: list[Stage]
    numbers: dict[str, Any]


def parts_of(name: str, homes: tuple[int, ...], world: World) -> Parts:
    made = MODELS[name]
    torch.manual_seed(1)
    model = made.made()
    *sample, _ = made.batch_of(0, 4)
    stages = split(model, len(homes), sample, world=world)
    own = [stage for stage, home in zip(stages, homes, strict=True) if home == world.rank]
    return Parts(model, own, copy.deepcopy(model.state_dict()))


def piped(case: Case, world: World, parts: Parts) -> tuple[list[float], dict[str, Any]]:
    """Losses and this rank's final parameters, by the model's names."""
    made, stages = MODELS[case["model"]], parts.stages
    parts.model.load_state_dict(parts.numbers)
    done: list[int] = []
    pipeline = Pipeline(
        stages,
        world,
        case.get("schedule", "1f1b"),
        case.get("micro", 4),
        made.loss_fn,
        recompute=case.get("recompute", "none"),
        on_gradients=lambda stage: done.append(stage.index),
    )
    parameters = list({id(p): p for stage in stages for p in stage.module.parameters() if p.requires_grad}.values())
    assert parameters, [str(stage) for stage in stages]
    optimizer = optimizer_of(case.get("optimizer", "sgd"), parameters)
    losses = []
    for step, samples in enumerate(case["sizes"]):
        *inputs, target = made.batch_of(step, samples)
        optimizer.zero_grad()
        losses.append(float(pipeline.step(inputs, target)))
        optimizer.step()
        assert sorted(done) == [stage.index for stage in stages]
        done.clear()
    return losses, {name: p.detach().numpy().copy() for stage in stages for name, p in stage.parameters().items()}


def many(cases: dict[str, Case]) -> dict[str, Any]:
    """Every case in one world; a model is split once for all its cases."""
    world = current()
    results = {}
    parts = functools.cache(parts_of)
    for name, case in cases.items():
        try:
            homes = stage_homes(case.get("schedule", "1f1b"), world.size, case.get("per_rank", 1))
            results[name] = piped(case, world, parts(case["model"], homes, world))
        except Exception as error:
            raise RuntimeError(f"in case {name}") from error
    return results
