"""Puts a model together as its plan says: divided, synchronised, and sharded, in this order."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch

from hocket.planner import Plan

from ..data import BroadcastBuffers, FullySharded, Replicated, ShardedOptimizer, ShardingStrategy, blocks, synchronise
from ..data.priority import Prioritised
from ..mesh import Mesh, World
from ..partition.spatial import parallelize as divide_samples
from ..pipeline import Pipeline, Stage
from ..state import (
    ParameterPlacement,
    WholeNorms,
    broadcast_optimizer_state,
    broadcast_tensors,
    check_model,
    shard_optimizer,
)
from ._composition import Composition
from ._distribute import take_own_gpu
from ._divide import divide_embeddings, divide_layers, divide_tensors, sample_inputs
from ._passes import LossFn, Passes, Reduction, StagedPasses, WholePasses
from ._precision import cast_module, in_precision
from ._recompute import recompute
from ._refusals import check_arguments, check_tied


def compose(
    model: torch.nn.Module,
    loss_fn: LossFn,
    optimizer: Any,
    plan: Plan,
    world: World,
    *,
    sample: Any,
    reduction: Reduction,
) -> Composition:
    """Makes ranks alike and changes the model as the plan says; a collective operation.

    Args:
        model: the user's.
        loss_fn: of output and target.
        optimizer: the user's, of the model's parameters.
        plan: resolved.
        world: all ranks.
        sample: inputs of the model, or None.
        reduction: of the loss.
    """
    inputs = sample_inputs(sample, plan)
    check_arguments(model, optimizer, plan)
    if world.size > 1:
        take_own_gpu(model)
        check_model(model, world)
    mesh = Mesh.make(
        world,
        pipeline=plan.pipeline_parallel_degree,
        tensor=plan.tensor_parallel_degree,
        batch_norm=(plan.batch_norm_group or plan.data_parallel_degree) if plan.sync_batch_norm else 1,
        spatial=plan.spatial_parallel_degree,
    )
    if world.size > 1:
        broadcast_tensors([*model.parameters(), *model.buffers()], world)
        broadcast_optimizer_state(optimizer, world)
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    groups = _groups(model, optimizer)
    places, tensor_form = divide_tensors(model, optimizer, plan, mesh, inputs)
    notes = [] if tensor_form is None else str(tensor_form).splitlines()
    stages: list[Stage] = []
    modules = [(model, {name: name for name in places})]
    if mesh.pipeline.size > 1:
        stages, about = divide_layers(model, optimizer, plan, mesh, inputs)
        notes += about
        modules = [(stage.module, dict(stage.names)) for stage in stages]
    spatial = None
    if mesh.spatial.size > 1:
        spatial = divide_samples(model, mesh.spatial, statistics=mesh.statistics, samples=mesh.batch_norm)
        notes.append(f"each sample divided among {mesh.spatial.size} ranks along the first of its spatial dims")
    elif plan.sync_batch_norm:
        changed = [name for module, _ in modules for name in synchronise(module, mesh.batch_norm)]
        notes.append(f"batch norm over {mesh.batch_norm.size} ranks: {', '.join(changed) or 'the model has none'}")
    if plan.recompute and not stages:
        notes.append(f"computed again in back-propagation: {', '.join(recompute(model)) or 'the model has no blocks'}")
    shared = {name for stage in stages for name in stage.shared}
    apart, about = divide_embeddings(modules, optimizer, plan, mesh, places, shared)
    notes += about
    apart_ids = {id(item.leaf) for item in apart}
    device = next((p.device.type for p in model.parameters()), "cpu")
    for module, _ in modules:
        cast_module(module, plan.precision, device)
    loss = in_precision(loss_fn, plan.precision, device)
    pipeline = None
    if stages:
        pipeline = Pipeline(
            stages,
            mesh.pipeline,
            plan.pipeline_schedule,
            plan.micro_batches,
            loss,
            loss_reduction=reduction,
            recompute="stage" if plan.recompute else "none",
        )
        check_tied(pipeline, plan, mesh)
    parameters = {
        names[n]: p for module, names in modules for n, p in module.named_parameters() if id(p) not in apart_ids
    }
    trained = {name: p for name, p in parameters.items() if id(p) not in frozen}
    kept = {name: p for name, p in parameters.items() if id(p) in frozen}
    elements = sum(p.numel() for p in trained.values())
    # Workers that do not agree at every step compute gradients as if each were alone.
    data = mesh.data if plan.synchronisation == "every_step" else World(0, 1, None)
    buffers = BroadcastBuffers([module for module, _ in modules], data)
    form = _form(plan, mesh, model, modules, trained, kept, places, optimizer)
    form.owned += [item for item in apart if id(item.leaf) not in frozen]
    form.frozen += [item for item in apart if id(item.leaf) in frozen]
    whole = {p for group in optimizer.param_groups for p in group["params"] if id(p) in frozen}
    shard_optimizer(optimizer, form.owned, whole)
    holders = Counter(name for names in mesh.pipeline.from_all(list(trained)) for name in names)
    passes: Passes
    answers = mesh.tensor.rank == 0
    if pipeline is None:
        running = nullcontext if spatial is None else spatial.running
        answers = answers and mesh.spatial.rank == 0
        passes = WholePasses(model, loss, reduction, form, buffers, data, answers=answers, running=running)
    else:
        answers = answers and pipeline.holds_last
        passes = StagedPasses(pipeline, reduction, form, buffers, mesh.data, answers=answers)
    composition = Composition(
        model=model,
        modules=modules,
        places=places,
        mesh=mesh,
        form=form,
        passes=passes,
        buffers=buffers,
        optimizer=optimizer,
        plan=plan,
        elements=elements,
        apart=sum(item.leaf.numel() for item in apart),
        cut=frozenset() if tensor_form is None else frozenset(tensor_form.pieces),
        holders=dict(holders),
        spatial=spatial,
        notes=notes,
    )
    copies = composition.copies()
    composition.local = all(world.from_all(all(count == world.size for _, count in copies)))
    if hasattr(optimizer, "bind_norms"):
        optimizer.bind_norms(WholeNorms(groups, copies, world, local=composition.local))
    return composition


def _groups(model: torch.nn.Module, optimizer: Any) -> dict[str, int]:
    """The number of its parameter group, for each parameter of the model that the optimizer is to update."""
    numbers = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return {name: numbers[id(p)] for name, p in model.named_parameters() if p.requires_grad and id(p) in numbers}


def _form(
    plan: Plan,
    mesh: Mesh,
    model: torch.nn.Module,
    modules: list[tuple[torch.nn.Module, dict[str, str]]],
    trained: dict[str, torch.nn.Parameter],
    frozen: dict[str, torch.nn.Parameter],
    places: dict[str, ParameterPlacement],
    optimizer: Any,
) -> ShardingStrategy:
    if plan.priority and mesh.data.size > 1:
        return Prioritised(model, trained, frozen, places, mesh.data, plan.bucket_bytes, optimizer)
    if plan.shard == "none" or mesh.replicas.size == 1:
        averages = plan.synchronisation == "every_step"
        return Replicated(
            trained, frozen, places, mesh.replicas, plan.bucket_bytes, plan.compression, averages=averages
        )
    if plan.shard == "parameters":
        return FullySharded(modules, places, mesh.replicas, [name for name, _ in blocks(model)])
    keep = plan.shard == "optimizer"
    return ShardedOptimizer(
        trained, frozen, places, mesh.replicas, plan.bucket_bytes, plan.compression, keep_gradients=keep
    )
