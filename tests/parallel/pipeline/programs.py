"""What ranks do in the tests of the pipeline."""

from __future__ import annotations

from typing import Any

import torch

from hocket.parallel.mesh.world import World, current
from hocket.parallel.pipeline import Pipeline, split

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


def piped(case: Case, world: World) -> tuple[list[float], dict[str, Any]]:
    """Losses and this rank's final parameters, by the model's names."""
    made = MODELS[case["model"]]
    torch.manual_seed(1)
    model = made.made()
    *sample, _ = made.batch_of(0, 4)
    per_rank = case.get("per_rank", 1)
    stages = split(model, world.size * per_rank, sample, world=world)[world.rank :: world.size]
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
    return losses, {name: p.detach().numpy() for stage in stages for name, p in stage.parameters().items()}


def many(cases: dict[str, Case]) -> dict[str, Any]:
    """Every case in one world."""
    world = current()
    results = {}
    for name, case in cases.items():
        try:
            results[name] = piped(case, world)
        except Exception as error:
            raise RuntimeError(f"in case {name}") from error
    return results
